// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
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
	source source
	// machine is nil where a transcript is replayed.
	machine *machine
	calls   *calls
	known   map[string]Entry // facts, by kind and question

	// gpu is the one that MPS or Intrusive works on. Where there is none, or no MPS on it,
	// missing is what the checks of the part find.
	gpu     *gpu.GPU
	missing Finding
	// changes is true where Intrusive has begun, and before what partA, the checks of
	// ReadOnly, found then.
	changes  bool
	before   []Result
	partA    []Check
	measured map[string]*measurements // by product
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
	queues := call.New(o.Limit / callsInLimit)
	m := &machine{Options: o, transcript: &transcript{out: o.Transcript}, calls: &calls{}, daemon: newDaemon(o), reserved: &reservations{calls: queues}}
	m.hardware = nvml.New(nvml.Options{Roots: o.Roots, Calls: queues, Observe: m.observe})
	header := Header{
		Version: version.Get().Version, Node: o.NodeName, Time: time.Now().UTC().Format(time.RFC3339), Parts: o.Parts, GPU: o.GPU, Skip: o.Skip,
	}
	recorded := header
	recorded.Transcript = transcriptVersion
	m.transcript.add(recorded)
	return &Node{header: header, source: m, machine: m, calls: m.calls, known: map[string]Entry{}, measured: map[string]*measurements{}}
}

// Replay returns the node that a transcript is about.
func Replay(in io.Reader) (*Node, error) {
	header, player, err := readTranscript(in)
	if err != nil {
		return nil, err
	}
	header.Transcript = 0
	return &Node{
		header: header, source: player, calls: &calls{all: player.calls}, known: map[string]Entry{}, measured: map[string]*measurements{},
	}, nil
}

// Run runs the checks of all parts that the options name. ctx bounds it: what was not asked
// by then is not testable.
func Run(ctx context.Context, n *Node) *Report {
	report := &Report{Header: n.header}
	n.partA = Checks(ReadOnly)
	for _, part := range n.header.Parts {
		before := report.Summary
		n.gpu, n.missing = nil, Finding{}
		report.run(ctx, n, Checks(part))
		after := report.Summary
		report.untested = report.untested || after.Holds == before.Holds && after.Differs == before.Differs
	}
	return report
}

// forget makes the next check ask again for what is known of the node. It is for the moments at
// which that may have changed.
func (n *Node) forget() { clear(n.known) }

// Close ends what the checks have started and the session with the driver. It returns the
// error of writing the transcript, too.
func (n *Node) Close() error {
	if n.machine == nil {
		return nil
	}
	err := n.machine.close(n.header.Parts, n.changes)
	n.machine.hardware.Close()
	return errors.Join(err, n.machine.transcript.failed())
}

// machine is the source that asks the node itself. It writes a transcript.
type machine struct {
	Options

	hardware   *nvml.Client
	transcript *transcript
	calls      *calls
	daemon     *daemon
	// reserved are the GPUs that MPS and Intrusive keep claims off.
	reserved *reservations
}

// endLimit is how long the end of MPS may take.
const endLimit = 30 * time.Second

// close ends MPS, and puts a GPU back that was changed, whatever was left behind.
func (m *machine) close(parts []Part, changed bool) error {
	if !slices.Contains(parts, MPS) && !slices.Contains(parts, Intrusive) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	err := m.daemon.close(ctx)
	if changed {
		err = errors.Join(err, m.undo(ctx))
	}
	return err
}

// callsInLimit is how many calls into NVML that hang fit into the limit of a question. A
// question about all GPUs then has an answer that names the one that hangs.
const callsInLimit = 2

func (m *machine) answer(ctx context.Context, kind Kind, question string, live func(context.Context) (json.RawMessage, error)) Entry {
	start := time.Now()
	answer, err := within(ctx, m.Limit, live)
	entry := Entry{Kind: kind, Question: question, Answer: answer, Took: time.Since(start).Round(time.Microsecond).String()}
	if err != nil {
		entry.Failure = failure(err)
	}
	m.transcript.add(entry)
	return entry
}

// within runs f and leaves it behind when it takes too long: a call into a driver that
// hangs cannot be cancelled.
func within(ctx context.Context, limit time.Duration, f func(context.Context) (json.RawMessage, error)) (json.RawMessage, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w: the time for all checks is over", ErrNoAnswer)
	}
	type answer struct {
		data json.RawMessage
		err  error
	}
	asking, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	answers := make(chan answer, 1)
	go func() {
		data, err := f(asking)
		answers <- answer{data, err}
	}()
	select {
	case a := <-answers:
		switch {
		case gpu.IsPending(a.err):
			return nil, fmt.Errorf("%w in %s: %w", ErrNoAnswer, limit/callsInLimit, a.err)
		case a.err != nil && asking.Err() != nil:
			return nil, fmt.Errorf("%w in %s: %w", ErrNoAnswer, limit, a.err)
		}
		return a.data, a.err
	case <-asking.Done():
		return nil, fmt.Errorf("%w in %s", ErrNoAnswer, limit)
	}
}

// observe notes a call into NVML.
func (m *machine) observe(_ context.Context, c nvml.Call) {
	m.calls.add(c)
	question := c.Function
	if c.PCIAddress != "" {
		question += ofGPUWord + c.PCIAddress
	}
	entry := Entry{Kind: Call, Question: question, Took: c.Took.Round(time.Microsecond).String()}
	if c.Err != nil {
		entry.Failure = failure(c.Err)
	} else if data, err := json.Marshal(c.Answer); err == nil {
		entry.Answer = data
	}
	m.transcript.add(entry)
}

// calls are the calls into NVML so far.
type calls struct {
	mu  sync.Mutex
	all []nvml.Call
}

func (c *calls) add(call nvml.Call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, call)
}

// times returns how long the calls of each function took, in order, of those that matter.
func (c *calls) times(matters func(nvml.Call) bool) map[string][]time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	took := map[string][]time.Duration{}
	for _, call := range c.all {
		if matters(call) {
			took[call.Function] = append(took[call.Function], call.Took)
		}
	}
	for _, times := range took {
		slices.Sort(times)
	}
	return took
}
