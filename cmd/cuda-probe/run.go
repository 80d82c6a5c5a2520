// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"time"

	"github.com/partage-dev/partage/pkg/conformance/cuda"
	"github.com/partage-dev/partage/pkg/conformance/cuda/probe"
)

// session is one run.
type session struct {
	options probe.Options
	driver  *cuda.Driver
	// say prints an event. Who reads them ends this program when it ends.
	say func(probe.Event)
	// taken are the allocations, and their sum in bytes.
	taken []cuda.Allocation
	sum   uint64
}

func newSession(o probe.Options, stdout io.Writer) *session {
	encoder := json.NewEncoder(stdout)
	return &session{options: o, say: func(e probe.Event) { _ = encoder.Encode(e) }}
}

// finish does what the options say. What fails is also said as an event.
func (s *session) finish(ctx context.Context, stdin io.Reader) error {
	err := s.run(ctx, stdin)
	if err != nil {
		s.say(failure(probe.Failed, err))
		return err
	}
	s.say(probe.Event{Kind: probe.Done, AllocatedBytes: s.sum})
	return nil
}

// failure makes an event of an error.
func failure(kind probe.Kind, err error) probe.Event {
	var result *cuda.Error
	if errors.As(err, &result) {
		return probe.Event{Kind: kind, Call: result.Call, Code: result.Code, Result: result.Name}
	}
	return probe.Event{Kind: kind, Result: err.Error()}
}

func (s *session) run(ctx context.Context, stdin io.Reader) error {
	if err := s.start(); err != nil {
		return err
	}
	if err := s.makeContext(); err != nil {
		return err
	}
	if err := s.take(); err != nil {
		return err
	}
	if s.options.Hold || s.options.Busy {
		if err := s.hold(ctx, stdin); err != nil {
			return err
		}
	}
	return s.driver.DestroyContext()
}

// start loads and initialises CUDA, and lists the devices.
func (s *session) start() error {
	var err error
	if s.driver, err = cuda.Load(s.options.Library); err != nil {
		return err
	}
	version, err := s.driver.Version()
	if err != nil {
		return err
	}
	s.say(probe.Event{Kind: probe.Loaded, Library: s.options.Library, Version: version})
	began := time.Now()
	if err := s.driver.Init(); err != nil {
		return err
	}
	took := milliseconds(time.Since(began))
	count, err := s.driver.Count()
	if err != nil {
		return err
	}
	s.say(probe.Event{Kind: probe.Initialized, Milliseconds: took, Devices: count})
	for i := range count {
		d, err := s.driver.Device(i)
		if err != nil {
			return err
		}
		s.say(probe.Event{
			Kind: probe.Device, Device: i, Name: d.Name, UUID: d.UUID, Multiprocessors: d.Multiprocessors, TotalBytes: d.TotalBytes,
		})
	}
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// makeContext makes a context on the only device that the caller lets this program see.
func (s *session) makeContext() error {
	began := time.Now()
	if err := s.driver.CreateContext(0); err != nil {
		return err
	}
	e := probe.Event{Kind: probe.Context, Milliseconds: milliseconds(time.Since(began))}
	// A percentage of MPS may show only now.
	d, err := s.driver.Device(0)
	if err != nil {
		return err
	}
	e.Multiprocessors = d.Multiprocessors
	if count, ok := s.driver.ContextMultiprocessors(); ok {
		e.ContextMultiprocessors = count
	}
	s.say(e)
	return s.sayMemory()
}

func (s *session) sayMemory() error {
	free, total, err := s.driver.Memory()
	if err == nil {
		s.say(probe.Event{Kind: probe.Memory, FreeBytes: free, TotalBytes: total})
	}
	return err
}

// take takes the memory that the options ask for. That there is not enough is no
// error, but what the caller wants to know.
func (s *session) take() error {
	if bytes := s.options.Allocate; bytes > 0 {
		if err := s.allocate(bytes); full(err) {
			s.refused(err, bytes)
		} else if err != nil {
			return err
		} else {
			s.say(probe.Event{Kind: probe.Allocated, Bytes: bytes, AllocatedBytes: s.sum})
		}
	}
	if s.options.FillUpTo > 0 {
		if err := s.fill(); err != nil {
			return err
		}
	}
	if len(s.taken) == 0 {
		return nil
	}
	return s.sayMemory()
}

func (s *session) allocate(bytes uint64) error {
	a, err := s.driver.Allocate(bytes)
	if err == nil {
		s.taken, s.sum = append(s.taken, a), s.sum+bytes
	}
	return err
}

func full(err error) bool {
	var result *cuda.Error
	return errors.As(err, &result) && result.Code == cuda.OutOfMemory
}

// refused says that there was not enough memory, which ends nothing.
func (s *session) refused(err error, bytes uint64) {
	e := failure(probe.Refused, err)
	e.Bytes, e.AllocatedBytes = bytes, s.sum
	s.say(e)
}

// Memory is taken in pieces, the smallest of which is that in which drivers give it.
const (
	largestPiece  = 1 << 30
	smallestPiece = 2 << 20
)

// fill takes memory until there is no more, in ever smaller pieces.
func (s *session) fill() error {
	for piece := uint64(largestPiece); piece >= smallestPiece; {
		if s.sum+piece > s.options.FillUpTo {
			piece /= 2
			continue
		}
		err := s.allocate(piece)
		switch {
		case err == nil:
			continue
		case !full(err):
			return err
		case piece == smallestPiece:
			s.refused(err, piece)
			return nil
		}
		piece /= 2
	}
	s.say(probe.Event{Kind: probe.Allocated, AllocatedBytes: s.sum})
	return nil
}

// hold keeps the context until ctx or the standard input ends, or the context is no
// good any more.
func (s *session) hold(ctx context.Context, stdin io.Reader) error {
	// Who hears that it holds takes it for busy.
	if err := s.work(); err != nil {
		return err
	}
	s.say(probe.Event{Kind: probe.Holding, PID: os.Getpid(), AllocatedBytes: s.sum})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		cancel()
	}()
	for {
		select {
		case <-ctx.Done():
			return s.driver.Synchronize()
		case <-time.After(s.pause()):
		}
		if err := s.work(); err != nil {
			return err
		}
	}
}

// work looks whether the context still is good. A busy program gives the device more work
// instead, and never waits for it, so that there is some whenever the program is killed.
func (s *session) work() error {
	if !s.options.Busy {
		return s.driver.Synchronize()
	}
	const rounds = 8
	for range rounds {
		for _, a := range s.taken {
			if err := s.driver.Fill(a); err != nil {
				return err
			}
		}
	}
	return nil
}

// pause is the time between two looks, or pieces of work.
func (s *session) pause() time.Duration {
	if s.options.Busy {
		return time.Millisecond
	}
	const look = 50 * time.Millisecond
	return look
}
