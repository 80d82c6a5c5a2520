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

	// say prints an event. Who reads them ends this program when it ends.
	say func(probe.Event)
	// taken are the allocations, and their sum in bytes.
	taken []allocation
	sum   uint64
}

// finish does what the options say. What fails is also said as an event.
func finish(ctx context.Context, o probe.Options, stdin io.Reader, stdout io.Writer) error {
	encoder := json.NewEncoder(stdout)
	s := &session{Options: o, say: func(e probe.Event) { _ = encoder.Encode(e) }}
	for _, step := range []func() error{s.start, s.take, func() error { return s.hold(ctx, stdin) }, s.destroyContext} {
		if err := step(); err != nil {
			s.say(failure(probe.Failed, err))
			return err
		}
	}
	s.say(probe.Event{Kind: probe.Done, AllocatedBytes: s.sum})
	return nil
}

// failure makes an event of an error.
func failure(kind probe.Kind, err error) probe.Event {
	var result *cudaError
	if errors.As(err, &result) {
		return probe.Event{Kind: kind, Call: result.call, Result: result.name}
	}
	return probe.Event{Kind: kind, Result: err.Error()}
}

// start loads CUDA, lists the devices, and makes a context on the only one that the caller
// lets this program see.
func (s *session) start() error {
	if err := s.load(s.Library); err != nil {
		return err
	}
	count, err := s.count()
	for i := 0; i < count && err == nil; i++ {
		err = s.sayIf(s.device(i))
	}
	if err == nil {
		err = s.sayIf(s.makeContext())
	}
	if err == nil {
		err = s.sayIf(s.memory())
	}
	return err
}

// sayIf says what was found out, unless that failed.
func (s *session) sayIf(e probe.Event, err error) error {
	if err == nil {
		s.say(e)
	}
	return err
}

// Memory is taken in pieces, the smallest of which is that in which drivers give it.
const (
	largestPiece  = 1 << 30
	smallestPiece = 2 << 20
)

// take takes the memory that the options ask for. That there is not enough is no error, but
// what the caller wants to know.
func (s *session) take() (err error) {
	if s.Allocate > 0 {
		err = s.get(s.Allocate)
	}
	if s.FillUpTo > 0 && err == nil {
		err = s.getAll()
	}
	if isFull(err) {
		e := failure(probe.Refused, err)
		e.AllocatedBytes, err = s.sum, nil
		s.say(e)
	}
	if len(s.taken) == 0 || err != nil {
		return err
	}
	return s.sayIf(s.memory())
}

func (s *session) get(bytes uint64) error {
	a, err := s.allocate(bytes)
	if err == nil {
		s.taken, s.sum = append(s.taken, a), s.sum+bytes
	}
	return err
}

// getAll takes memory in ever smaller pieces until there is no more, which is the error then.
func (s *session) getAll() (err error) {
	for piece := uint64(largestPiece); piece >= smallestPiece; {
		if s.sum+piece <= s.FillUpTo {
			if err = s.get(piece); err == nil {
				continue
			}
			if !isFull(err) {
				return err
			}
		}
		piece /= 2
	}
	return err
}

// hold keeps the context until ctx or the standard input ends, or the context is no
// good any more.
func (s *session) hold(ctx context.Context, stdin io.Reader) error {
	if !s.Hold && !s.Busy {
		return nil
	}
	// Who hears that it holds takes it for busy.
	if err := s.work(); err != nil {
		return err
	}
	s.say(probe.Event{Kind: probe.Holding})
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
	for {
		select {
		case <-ctx.Done():
			return s.synchronize()
		case <-time.After(pause):
		}
		if err := s.work(); err != nil {
			return err
		}
	}
}

// work asks whether the context still is good. A busy program gives the device more work
// instead, and never waits for it, so that there is some whenever the program is killed.
func (s *session) work() error {
	if !s.Busy {
		return s.synchronize()
	}
	const rounds = 8
	for range rounds {
		for _, a := range s.taken {
			if err := s.fill(a); err != nil {
				return err
			}
		}
	}
	return nil
}
