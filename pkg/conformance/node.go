// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/partage-dev/partage/pkg/call"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/version"
)

// Options say which node to examine, and how.
type Options struct {
	// Roots are the driver's own, from the same flags.
	Roots host.Roots
	// CDIDir is the folder for spec files. MPSDir is that of the MPS supervisor.
	CDIDir, MPSDir string
	// SELinuxContext is the setting for what containers get in memory.
	SELinuxContext string
	// CallLimit is the driver's for one call into NVML.
	CallLimit time.Duration
	// NodeName is for the report. By default it is the host name.
	NodeName string
	// NodeInfo asks the API server; nil if it is not known.
	NodeInfo func(context.Context) (NodeInfo, error)
	// Limit is how long one question may take. 0 means 10 s.
	Limit time.Duration
	// Parts are the parts to run.
	Parts []Part
	// Skip are the IDs of checks that are not to run.
	Skip []string
	// GPU is the UUID of the GPU that MPS and Intrusive work on. MPS finds one by itself.
	GPU string
	// WorkDir is a folder for the files of MPS; its path is short, since sockets' are.
	WorkDir string
	// Probe is the program cuda-probe.
	Probe string
	// DataDir is the driver's, with its socket, its records of claims and its locks of GPUs.
	// Intrusive keeps in it how the GPU was.
	DataDir string
	// RuntimeSocket is that of the container runtime; by default it is looked for. Image has
	// cuda-probe at the path of Probe and is on the node; by default it is that of this
	// container, by its ID or PodUID.
	RuntimeSocket, Image, PodUID string
	// Hook installs the hook that CDI specs name, and returns its path on the host.
	Hook func() (string, error)
	// Transcript, if there is one, is written line by line.
	Transcript io.Writer
}

const defaultLimit = 10 * time.Second

// Node is the node that checks ask about.
type Node struct {
	Options

	header Header
	source source
	// transcript is nil where one is replayed.
	transcript *transcript
	hardware   *nvml.Client
	calls      calls
	gpus       *gpu.Node
	gpusErr    error
	known      map[string]nvml.Facts // by PCI address

	lab       *lab
	labChoice *usable
	// labFailed says why there is no MPS to put questions to.
	labFailed string
	subject   subject
	measured  map[string]*measurements // by product
	// reserved are the GPUs that MPS and Intrusive keep claims off.
	reserved reservations
	// partA are the checks that Intrusive runs before and after it.
	partA []Check
}

// NewNode returns this machine. Close ends what it has opened.
func NewNode(o Options) *Node {
	if o.Limit == 0 {
		o.Limit = defaultLimit
	}
	o.Roots = o.Roots.Complete()
	if o.NodeName == "" {
		o.NodeName, _ = os.Hostname()
	}
	t := &transcript{out: o.Transcript}
	n := &Node{
		Options: o, transcript: t, source: &machine{limit: o.Limit, transcript: t}, known: map[string]nvml.Facts{},
		header: Header{
			Version: version.Get().Version, Node: o.NodeName, Time: time.Now().UTC().Format(time.RFC3339), Parts: o.Parts, GPU: o.GPU,
			Skip: o.Skip,
		},
	}
	n.lab = newLab(o)
	n.reserved.calls = call.New(o.Limit / callsInLimit)
	n.hardware = nvml.New(nvml.Options{Roots: o.Roots, Calls: n.reserved.calls, Observe: n.observe})
	recorded := n.header
	recorded.Transcript = transcriptVersion
	t.add(recorded)
	return n
}

// Replay returns the node that a transcript is about.
func Replay(in io.Reader) (*Node, error) {
	header, player, err := readTranscript(in)
	if err != nil {
		return nil, err
	}
	header.Transcript = 0
	n := &Node{
		Options: Options{NodeName: header.Node, Parts: header.Parts, GPU: header.GPU, Skip: header.Skip}, header: header, source: player, known: map[string]nvml.Facts{},
	}
	n.calls.all = player.calls
	return n, nil
}

// Close ends the session with the driver. It returns the error of writing the transcript.
func (n *Node) Close() error {
	if n.hardware == nil {
		return nil
	}
	err := n.closeLab()
	n.reserved.releaseAll()
	n.hardware.Close()
	return errors.Join(err, n.transcript.failed())
}

// Hardware returns the driver's own access to NVML, with an open session. It is for the
// function that Ask runs; there is none while a transcript is replayed.
func (n *Node) Hardware(ctx context.Context) (*nvml.Client, error) {
	if err := n.hardware.Open(ctx); err != nil {
		return nil, err
	}
	return n.hardware, nil
}

// GPUs returns all GPUs of the node, as the driver discovers them. It asks once.
func (n *Node) GPUs(ctx context.Context) (*gpu.Node, error) {
	if n.gpus == nil && n.gpusErr == nil {
		n.gpus, n.gpusErr = Ask(ctx, n, NVML, "all GPUs", func(ctx context.Context) (*gpu.Node, error) {
			hardware, err := n.Hardware(ctx)
			if err != nil {
				return nil, err
			}
			return hardware.Discover(ctx)
		})
	}
	return n.gpus, n.gpusErr
}

// EachGPU runs a check for each GPU that can be read. A node whose GPUs cannot be read is
// one finding, unless that is said by the check which is about it.
func (n *Node) EachGPU(ctx context.Context, expected string, check func(*gpu.GPU) []Finding) []Finding {
	node, err := n.GPUs(ctx)
	if err != nil {
		f := Cannot("", expected, "the GPUs cannot be read: %v", err)
		f.unanswered = errors.Is(err, ErrNoAnswer)
		return []Finding{f}
	}
	var findings []Finding
	for i := range node.GPUs {
		findings = append(findings, check(&node.GPUs[i])...)
	}
	return findings
}
