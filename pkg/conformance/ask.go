// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
)

// Kind is what a question is put to.
type Kind string

// Values of Kind.
const (
	// File is for the node's file systems.
	File Kind = "file"
	// Command is for the driver's programs.
	Command Kind = "command"
	// NVML is for NVIDIA's management library, through package nvml.
	NVML Kind = "nvml"
	// API is for the API server.
	API Kind = "api"
	// Daemon is for MPS: its control daemon, its server, their files.
	Daemon Kind = "mps"
	// Client is for a CUDA program that is a client of MPS.
	Client Kind = "mps client"
	// Change is for what changes the GPU.
	Change Kind = "change"
	// Call is one call into NVML. No check asks these: they are in the transcript beside
	// the answers that were made of them.
	Call Kind = "nvml call"
)

// ErrNoAnswer says that the node did not answer a question in time.
var ErrNoAnswer = errors.New("no answer")

// ask puts a question to the node, or to the transcript that is replayed. The text of the
// question is the same on every node: it names no root, and nothing that a run makes up. A
// question that is asked twice has two answers.
//
// live finds the answer out. It is left behind where it takes longer than Options.Limit; so it
// must not write to what others read. The answer must survive JSON. The error wraps
// ErrNoAnswer if there was none in time, and otherwise the one of reasons that live's wraps.
func ask[T any](ctx context.Context, n *Node, kind Kind, question string, live func(context.Context, *machine) (T, error)) (T, error) {
	return decode[T](put(ctx, n, kind, question, live))
}

// put returns what the transcript gets of a question.
func put[T any](ctx context.Context, n *Node, kind Kind, question string, live func(context.Context, *machine) (T, error)) Entry {
	if n.machine == nil {
		return n.recorded.answer(kind, question)
	}
	start := time.Now()
	answer, err := within(ctx, n.machine, live)
	entry := Entry{Kind: kind, Question: question, Took: time.Since(start).Round(time.Microsecond).String()}
	if err == nil {
		entry.Answer, err = json.Marshal(answer)
	}
	entry.Failure = failure(err)
	n.transcript.add(entry)
	return entry
}

// within runs live and leaves it behind when it takes too long: a call into a driver that
// hangs cannot be cancelled.
func within[T any](ctx context.Context, m *machine, live func(context.Context, *machine) (T, error)) (value T, err error) {
	if ctx.Err() != nil {
		return value, fmt.Errorf("%w: the time for all checks is over", ErrNoAnswer)
	}
	type answer struct {
		value T
		err   error
	}
	asking, cancel := context.WithTimeout(ctx, m.Limit)
	defer cancel()
	answers := make(chan answer, 1)
	go func() {
		value, err := live(asking, m)
		answers <- answer{value, err}
	}()
	select {
	case a := <-answers:
		switch {
		case gpu.IsPending(a.err):
			a.err = fmt.Errorf("%w in %s: %w", ErrNoAnswer, m.Limit/callsInLimit, a.err)
		case a.err != nil && asking.Err() != nil:
			a.err = fmt.Errorf("%w in %s: %w", ErrNoAnswer, m.Limit, a.err)
		}
		return a.value, a.err
	case <-asking.Done():
		return value, fmt.Errorf("%w in %s", ErrNoAnswer, m.Limit)
	}
}

// decode reads an answer as it is read from a transcript, so that a live run sees no more than a
// replayed one.
func decode[T any](entry Entry) (value T, err error) {
	if entry.Failure != nil {
		return value, entry.Failure
	}
	if err := json.Unmarshal(entry.Answer, &value); err != nil {
		return value, fmt.Errorf("answer to %q: %w", entry.Question, err)
	}
	return value, nil
}

// fact is a question with the way to its answer, which changes nothing.
type fact[T any] struct {
	kind     Kind
	question string
	read     func(context.Context, *machine) (T, error)
}

// answer returns the answer. It is asked for once, until the node forgets what is known.
func (f fact[T]) answer(ctx context.Context, n *Node) (T, error) {
	k := key(f.kind, f.question)
	entry, ok := n.known[k]
	if !ok {
		entry = put(ctx, n, f.kind, f.question, f.read)
		n.known[k] = entry
	}
	return decode[T](entry)
}

// gpuFact is a fact of each GPU.
type gpuFact[T any] func(*gpu.GPU) fact[T]

// ofGPU is what NVML answers about a GPU, whose address is in the question.
func ofGPU[T any](question string, read func(context.Context, *nvml.Client, *gpu.GPU) (T, error)) gpuFact[T] {
	return func(g *gpu.GPU) fact[T] {
		return fact[T]{NVML, fmt.Sprintf(question, g.PCIAddress), onNVML(func(ctx context.Context, hardware *nvml.Client) (T, error) {
			return read(ctx, hardware, g)
		})}
	}
}

// onNVML opens the driver's own access to NVML for a question.
func onNVML[T any](read func(context.Context, *nvml.Client) (T, error)) func(context.Context, *machine) (T, error) {
	return func(ctx context.Context, m *machine) (T, error) {
		if err := m.hardware.Open(ctx); err != nil {
			var none T
			return none, err
		}
		return read(ctx, m.hardware)
	}
}

// Failure is an error as a transcript has it.
type Failure struct {
	Text string `json:"text"`
	// Is names the error that checks may look for.
	Is string `json:"is,omitempty"`
}

// reasons are the errors that checks tell apart. The first that fits counts.
var reasons = []struct {
	name string
	err  error
}{
	{"no answer", ErrNoAnswer},
	{"does not exist", fs.ErrNotExist},
	{"permission denied", fs.ErrPermission},
	{"not supported", gpu.ErrNotSupported},
}

func (f *Failure) Error() string { return f.Text }

// Unwrap returns the error that Is names.
func (f *Failure) Unwrap() error {
	for _, r := range reasons {
		if r.name == f.Is {
			return r.err
		}
	}
	return nil
}

// failure keeps of an error its text and what checks tell apart.
func failure(err error) *Failure {
	if err == nil {
		return nil
	}
	f := &Failure{Text: err.Error()}
	for _, r := range reasons {
		if f.Is == "" && errors.Is(err, r.err) {
			f.Is = r.name
		}
	}
	return f
}
