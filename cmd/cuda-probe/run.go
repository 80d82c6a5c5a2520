// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/partage-dev/partage/pkg/conformance/probe"
)

// session is one run.
type session struct {
	probe.Options
	driver

	// taken are the allocations, and their sum in bytes.
	taken []allocation
	sum   uint64
}

// finish does what the options say. What fails is also said as an event.
func finish(ctx context.Context, o probe.Options, stdin io.Reader, stdout io.Writer) error {
	encoder := json.NewEncoder(stdout)
	s := &session{Options: o, driver: driver{say: func(e probe.Event) { _ = encoder.Encode(e) }}}
	s.load(o.Library)
	for i := range s.count() {
		s.tell(s.device(i))
	}
	// The caller lets this program see only one device.
	s.makeContext()
	s.tellMemory()
	s.take()
	if s.err == nil && (o.Hold || o.Busy) {
		s.hold(ctx, stdin)
	}
	s.destroyContext()
	s.tell(probe.Event{Kind: probe.Done, AllocatedBytes: s.sum})
	if s.err != nil {
		s.say(failure(probe.Failed, s.err))
	}
	return s.err
}

// failure makes an event of an error.
func failure(kind probe.Kind, err error) probe.Event {
	var result *cudaError
	if errors.As(err, &result) {
		return probe.Event{Kind: kind, Call: result.call, Result: result.name}
	}
	return probe.Event{Kind: kind, Result: err.Error()}
}

// Memory is taken in pieces, the smallest of which is that in which drivers give it.
const (
	largestPiece  = 1 << 30
	smallestPiece = 2 << 20
)

// take takes the memory that the options ask for: a piece, and then ever smaller ones until there is no more. That there is
// not enough is no error, but what the caller wants to know.
func (s *session) take() {
	var full error
	if s.Allocate > 0 {
		full = s.get(s.Allocate)
	}
	for piece := uint64(largestPiece); piece >= smallestPiece && s.err == nil; {
		if s.sum+piece > s.FillUpTo {
			piece /= 2
		} else if full = s.get(piece); full != nil {
			piece /= 2
		}
	}
	if full != nil {
		e := failure(probe.Refused, full)
		e.AllocatedBytes = s.sum
		s.tell(e)
	}
	if len(s.taken) > 0 {
		s.tellMemory()
	}
}

// get takes a piece of memory, or returns that there is not enough.
func (s *session) get(bytes uint64) (full error) {
	a := s.allocate(bytes)
	if isFull(s.err) {
		full, s.err = s.err, nil
	} else if s.err == nil {
		s.taken, s.sum = append(s.taken, a), s.sum+bytes
	}
	return full
}

// hold keeps the context until ctx or the standard input ends, or the context is no
// good any more.
func (s *session) hold(ctx context.Context, stdin io.Reader) {
	// Who hears that it holds takes it for busy.
	s.work()
	s.tell(probe.Event{Kind: probe.Holding})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		cancel()
	}()
	pause := 50 * time.Millisecond
	if s.Busy {
		pause = time.Millisecond
	}
	for s.err == nil && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(pause):
			s.work()
		}
	}
	s.synchronize()
}

// work asks whether the context still is good. A busy program gives the device more work
// instead, and never waits for it, so that there is some whenever the program is killed.
func (s *session) work() {
	if !s.Busy {
		s.synchronize()
		return
	}
	const rounds = 8
	for range rounds {
		for _, a := range s.taken {
			s.fill(a)
		}
	}
}
