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
	// Call is one call into NVML. No check asks these: they are in the transcript beside
	// the answers that were made of them.
	Call Kind = "nvml call"
)

// ErrNoAnswer says that the node did not answer a question in time.
var ErrNoAnswer = errors.New("no answer")

// Ask puts a question to the node, or to the transcript that is replayed. The text of the
// question is the same on every node: it names no root, and nothing that a run makes up. A
// question that is asked twice has two answers.
//
// live finds the answer out. It is left behind where it takes longer than Node.Limit; so it
// must not write to what others read. The answer must survive JSON. The error wraps
// ErrNoAnswer if there was none in time; of the errors that package gpu and io/fs define it
// wraps the one that live's error wraps.
func Ask[T any](ctx context.Context, n *Node, kind Kind, question string, live func(context.Context) (T, error)) (T, error) {
	var value T
	entry := n.source.answer(ctx, kind, question, func(ctx context.Context) (json.RawMessage, error) {
		found, err := live(ctx)
		if err != nil {
			return nil, err
		}
		return json.Marshal(found)
	})
	if entry.Failure != nil {
		return value, entry.Failure
	}
	if err := json.Unmarshal(entry.Answer, &value); err != nil {
		return value, fmt.Errorf("answer to %q: %w", question, err)
	}
	return value, nil
}

// Failure is an error as a transcript has it.
type Failure struct {
	Text string `json:"text"`
	// Is names the error that checks may look for.
	Is string `json:"is,omitempty"`
}

// reasons are the errors that a transcript keeps apart. The first that fits counts.
var reasons = []struct {
	name string
	err  error
}{
	{"no answer", ErrNoAnswer},
	{"does not exist", fs.ErrNotExist},
	{"permission denied", fs.ErrPermission},
	{"driver not loaded", gpu.ErrDriverNotLoaded},
	{"version mismatch", gpu.ErrVersionMismatch},
	{"not supported", gpu.ErrNotSupported},
	{"no permission", gpu.ErrNoPermission},
	{"not found", gpu.ErrNotFound},
	{"lost", gpu.ErrLost},
	{"in use", gpu.ErrInUse},
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

func failure(err error) *Failure {
	f := &Failure{Text: err.Error()}
	for _, r := range reasons {
		if errors.Is(err, r.err) {
			f.Is = r.name
			break
		}
	}
	return f
}

// callsInLimit is how many calls into NVML that hang fit into the limit of a question. A
// question about all GPUs then has an answer that names the one that hangs.
const callsInLimit = 2

// source answers questions.
type source interface {
	answer(ctx context.Context, kind Kind, question string, live func(context.Context) (json.RawMessage, error)) Entry
}

// machine is the source that asks the node itself. It writes a transcript.
type machine struct {
	limit      time.Duration
	transcript *transcript
}

func (m *machine) answer(ctx context.Context, kind Kind, question string, live func(context.Context) (json.RawMessage, error)) Entry {
	start := time.Now()
	answer, err := within(ctx, m.limit, live)
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
