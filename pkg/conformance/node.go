// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/util/version"
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

// Node is the node that checks ask about, this machine or the one of a transcript.
type Node struct {
	header Header
	// machine is nil where a transcript is replayed. Then recorded has the answers, in the order of asking.
	machine    *machine
	recorded   map[string][]Entry
	transcript *transcript
	known      map[string]Entry // facts

	// gpu is the one that MPS or Intrusive works on. Where there is none, or no MPS on it,
	// missing is what the checks of the part find.
	gpu     *gpu.GPU
	missing Finding
	// before is what the read-only part found when Intrusive began, nil until then.
	before   []Result
	measured map[string]*measurements // by product
}

// machine is this node. Facts and acts reach it.
type machine struct {
	Options

	hardware   *nvml.Client
	transcript *transcript
	daemon     *daemon
	// reserved are the GPUs that MPS and Intrusive keep claims off.
	reserved *reservations
}

// callsInLimit is how many calls into NVML that hang fit into the limit of a question. A
// question about all GPUs then has an answer that names the one that hangs.
const callsInLimit = 2

// NewNode returns this machine. Close ends what it has opened.
func NewNode(o Options) *Node {
	if o.Limit == 0 {
		o.Limit = defaultLimit
	}
	o.Roots = o.Roots.Complete()
	if o.NodeName == "" {
		o.NodeName, _ = os.Hostname()
	}
	n := newNode(Header{
		Version: version.Get().Version, Node: o.NodeName, Time: time.Now().UTC().Format(time.RFC3339), Parts: o.Parts, GPU: o.GPU, Skip: o.Skip,
	})
	n.transcript.out = o.Transcript
	recorded := n.header
	recorded.Transcript = transcriptVersion
	n.transcript.add(recorded)
	queues := call.New(o.Limit / callsInLimit)
	n.machine = &machine{
		Options: o, transcript: n.transcript, reserved: newReservations(o.DataDir, queues),
		daemon:   &daemon{roots: o.Roots, folder: daemonFolder(o.WorkDir), probe: o.Probe},
		hardware: nvml.New(nvml.Options{Roots: o.Roots, Calls: queues, Observe: n.transcript.observe}),
	}
	return n
}

func newNode(header Header) *Node {
	return &Node{
		header: header, transcript: &transcript{}, recorded: map[string][]Entry{}, known: map[string]Entry{}, measured: map[string]*measurements{},
	}
}

// Run runs the checks of all parts that the options name. ctx bounds it: what was not asked
// by then is not testable.
func Run(ctx context.Context, n *Node) *Report {
	report := &Report{Header: n.header}
	for _, part := range n.header.Parts {
		before := report.Summary
		n.gpu, n.missing = nil, Finding{}
		report.run(ctx, n, Checks(part))
		after := report.Summary
		report.untested = report.untested || after.Holds == before.Holds && after.Differs == before.Differs
	}
	return report
}

// endLimit is how long the end of MPS may take.
const endLimit = 30 * time.Second

// Close ends what the checks have started and the session with the driver, and puts a GPU back that was changed, whatever was
// left behind. It returns the error of writing the transcript, too.
func (n *Node) Close() error {
	if n.machine == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	err := n.machine.daemon.close(ctx)
	if n.before != nil {
		err = errors.Join(err, n.machine.undo(ctx))
	}
	n.machine.hardware.Close()
	n.transcript.mu.Lock()
	defer n.transcript.mu.Unlock()
	return errors.Join(err, n.transcript.err)
}
