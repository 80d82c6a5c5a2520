// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// memoryInfo is what cuMemGetInfo returns: under a limit, what is left of it and
// all that the device has.
func (mb *member) memoryInfo(u *use, answer *reply) error {
	s := mb.server
	m, err := s.state.Snapshot()
	if err != nil {
		return err
	}
	d := s.devices[u.device]
	left, err := s.state.MemoryLeft(d.GPU, mb.pid)
	if err != nil {
		return err
	}
	answer.Total = d.Memory
	answer.Free = min(left, d.Memory-min(d.Memory, d.Used(m)))
	if limit := u.limits.Memory; limit > 0 {
		answer.Free = min(answer.Free, limit-min(limit, u.taken(d)))
	}
	return nil
}

// allocate makes that many more contexts of a client on a device, at least the first
// one, and gives it that much memory. A limit is for both, and so is that which the driver holds
// for the client's cgroup.
func (mb *member) allocate(u *use, contexts int, bytes uint64) error {
	s := mb.server
	if u.contexts == 0 {
		contexts = 1
	}
	d, before := s.devices[u.device], *u
	left, err := s.state.MemoryLeft(d.GPU, mb.pid)
	if err != nil {
		return err
	}
	u.contexts, u.memory = u.contexts+contexts, u.memory+bytes
	more := u.taken(d) - before.taken(d)
	err = s.state.Update(func(m *machine.Machine) error {
		switch limit := u.limits.Memory; {
		case contexts > 0 && s.contexts(u.device) > MaxContexts(d, m.CUDADriverVersion):
			return cuda.MPSMaxClientsReached
		case limit > 0 && u.taken(d) > limit || d.Used(m)+more > d.Memory || more > left:
			return cuda.OutOfMemory
		}
		if err := s.hasFiles(m, u.device); err != nil {
			return err
		}
		s.enter(m)
		return nil
	})
	if err != nil {
		*u = before
	}
	return err
}
