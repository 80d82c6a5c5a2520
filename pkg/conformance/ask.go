// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
)

// live finds out an answer, which must survive JSON. It is left behind where it takes longer than
// Options.Limit; so it must not write to what others read.
type live[T any] = func(context.Context, *machine) (T, error)

// put puts a question to the node, or to the transcript that is replayed, and returns what a transcript gets of it. The
// text of the question is the same on every node: it names no root, and nothing that a run makes up. A question that is
// asked twice has two answers. The failure is ErrNoAnswer if there was none in time.
func put[T any](ctx context.Context, n *Node, kind Kind, question string, answer live[T]) Entry {
	if n.machine == nil {
		return n.replay(kind, question)
	}
	start := time.Now()
	value, err := within(ctx, n.machine, answer)
	entry := newEntry(kind, question, value, err, time.Since(start))
	n.transcript.add(entry)
	return entry
}

// within leaves an answer behind that takes too long: a call into a driver that hangs cannot be cancelled.
func within[T any](ctx context.Context, m *machine, answer live[T]) (value T, err error) {
	if ctx.Err() != nil {
		return value, fmt.Errorf("%w: the time for all checks is over", ErrNoAnswer)
	}
	asking, cancel := context.WithTimeout(ctx, m.Limit)
	defer cancel()
	answered := make(chan func() (T, error), 1)
	go func() {
		value, err := answer(asking, m)
		answered <- func() (T, error) { return value, err }
	}()
	select {
	case get := <-answered:
		value, err = get()
		switch {
		case gpu.IsPending(err):
			err = fmt.Errorf("%w in %s: %w", ErrNoAnswer, m.Limit/callsInLimit, err)
		case err != nil && asking.Err() != nil:
			err = fmt.Errorf("%w in %s: %w", ErrNoAnswer, m.Limit, err)
		}
		return value, err
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

// inquiry is a judgement in the making: it asks one question after the other until one of them fails, and then has zero
// values for answers.
type inquiry struct {
	*Node

	ctx context.Context
	err error
}

// do asks a question again each time.
func do[T any](q *inquiry, kind Kind, question string, answer live[T]) (value T) {
	if q.err == nil {
		value, q.err = decode[T](put(q.ctx, q.Node, kind, question, answer))
	}
	return value
}

// fact is a question whose answer changes nothing. It is asked once, until the node forgets what is known.
type fact[T any] struct {
	kind     Kind
	question string
	read     live[T]
}

// try returns the answer, or why there is none.
func (f fact[T]) try(q *inquiry) (T, error) {
	asked := Entry{Kind: f.kind, Question: f.question}
	entry, ok := q.known[asked.key()]
	if !ok {
		entry = put(q.ctx, q.Node, f.kind, f.question, f.read)
		q.known[asked.key()] = entry
	}
	return decode[T](entry)
}

func (f fact[T]) of(q *inquiry) (value T) {
	if q.err == nil {
		value, q.err = f.try(q)
	}
	return value
}

// gpuFact is a fact of each GPU.
type gpuFact[T any] func(*gpu.GPU) fact[T]

// ofGPU is what NVML answers about a GPU, whose address is in the question.
func ofGPU[T any](question string, read func(*nvml.Client, context.Context, string) (T, error)) gpuFact[T] {
	return func(g *gpu.GPU) fact[T] {
		return fact[T]{NVML, fmt.Sprintf(question, g.PCIAddress), func(ctx context.Context, m *machine) (value T, err error) {
			if err = m.hardware.Open(ctx); err == nil {
				value, err = read(m.hardware, ctx, g.PCIAddress)
			}
			return value, err
		}}
	}
}
