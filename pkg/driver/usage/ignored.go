// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
	"github.com/partage-dev/partage/pkg/gpu"
)

// ReasonMemoryLimitIgnored tells that a container has a variable which limits its memory with NVIDIA's device plugin, and not here.
// Its image may have set it, so that no claim shows it.
const ReasonMemoryLimitIgnored = "MemoryLimitIgnored"

// environTime bounds a read of the environment of a process.
const environTime = time.Second

// tellIgnored tells, once for each claim, of programs that ask for a limit which the driver does not hold.
func (s *Sampler) tellIgnored(ctx context.Context, held []Holding, processes []gpu.ProcessUsage) {
	for i := range held {
		h := &held[i]
		if h.Held || s.hasWarned(h, false) || !slices.ContainsFunc(processes, func(p gpu.ProcessUsage) bool {
			pod := s.o.PodOf(p.PID)
			return pod != "" && s.o.Facts.may(h, pod) && s.asksForLimit(ctx, p.PID)
		}) {
			continue
		}
		s.hasWarned(h, true)
		s.o.Warn(ctx, h.Claim, ReasonMemoryLimitIgnored, hook.LimitVariable+" has no effect: the NVIDIA driver does not limit the memory of device "+h.Device+
			". It does so for shares of GPUs from driver 615 on, with cgroups of version 2")
	}
}

// hasWarned reports whether a claim was warned, or remembers that it is now.
func (s *Sampler) hasWarned(h *Holding, now bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.claims[keyOf(h)]
	if c == nil {
		return true // it has ended
	}
	c.warned = c.warned || now
	return c.warned
}

// asksForLimit reads the environment of a process, which is in its own memory: reading it may never return. So
// there is one read at a time, and nothing is known while one does not end.
func (s *Sampler) asksForLimit(ctx context.Context, pid int) bool {
	select {
	case s.environ <- struct{}{}:
	default:
		return false
	}
	found := make(chan bool, 1)
	go func() {
		defer func() { <-s.environ }()
		found <- slices.ContainsFunc(strings.Split(s.o.Environ(pid), "\x00"), func(v string) bool { return strings.HasPrefix(v, hook.LimitVariable+"=") })
	}()
	ctx, cancel := context.WithTimeout(ctx, environTime)
	defer cancel()
	select {
	case asks := <-found:
		return asks
	case <-ctx.Done():
		return false
	}
}
