// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// member is a client as its server sees it. The server's lock guards all of it
// but the connection.
type member struct {
	server   *Server
	pid, uid int
	// priorities says that there are any.
	priorities bool
	priority   priority
	decoder    *json.Decoder

	sending sync.Mutex
	encoder *json.Encoder

	uses  []use
	ended cuda.Error // of every further request; 0: none
	hit   bool       // by a fault, so that the server waits until it has gone
}

// use is a device that a client has joined.
type use struct {
	device   int // of the server
	limits   Limits
	contexts int
	memory   uint64 // beside the contexts' own
	busy     bool   // there is work that was not synchronised
}

// taken is all that the client has of the device's memory.
func (u *use) taken(d cuda.Device) uint64 { return u.memory + uint64(u.contexts)*d.ContextMemory }

// sm is how much of the device the client keeps busy: all that it may use, or nothing.
func (u *use) sm() int {
	if !u.busy {
		return 0
	}
	return int(math.Round(u.limits.Percentage))
}

// newMember makes one of a client that the daemon has handed over.
func newMember(s *Server, c *net.UnixConn, o order) *member {
	return &member{server: s, pid: o.PID, uid: o.UID, priorities: o.Priorities, priority: o.Priority, decoder: packets(c), encoder: json.NewEncoder(c)}
}

func (mb *member) send(v any) error {
	mb.sending.Lock()
	defer mb.sending.Unlock()
	return mb.encoder.Encode(v)
}

// serve serves the client until it goes.
func (mb *member) serve() error {
	s := mb.server
	s.log.printf("Received new client request for {PID: %d}", mb.pid)
	s.mu.Lock()
	w := welcome{Shared: s.shared}
	if s.status == machine.MPSFault {
		w = welcome{Code: cuda.MPSServerNotReady}
	}
	for _, d := range s.devices {
		w.Devices = append(w.Devices, d.UUID)
	}
	s.mu.Unlock()
	if err := mb.send(w); err != nil || w.Code != 0 {
		return err
	}
	var j join
	if err := mb.decoder.Decode(&j); err != nil {
		return err
	}
	if mb.priorities && j.Priority != nil {
		mb.priority = *j.Priority
	}
	answer := joined{Code: mb.connect(j), Priority: mb.priority}
	s.mu.Lock()
	for i := range mb.uses {
		answer.Devices = append(answer.Devices, mb.uses[i].limits)
	}
	s.mu.Unlock()
	if err := mb.send(answer); err != nil || answer.Code != 0 {
		return err
	}
	for {
		var r request
		if err := mb.decoder.Decode(&r); err != nil {
			return err
		}
		if err := mb.send(mb.handle(r)); err != nil {
			return err
		}
	}
}

// code is the CUresult of an error.
func code(err error) cuda.Error {
	var e cuda.Error
	switch {
	case err == nil:
		return 0
	case errors.As(err, &e):
		return e
	}
	return cuda.MPSRPCFailure
}

// connect takes the client in, or says why not.
func (mb *member) connect(j join) cuda.Error {
	s := mb.server
	err := s.state.Around(ClientConnect, gpusOf(s.devices), func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.take(mb, j)
	})
	if errors.Is(err, state.ErrStruck) {
		return cuda.MPSConnectionFailed
	}
	return code(err)
}

// take makes the client one of the server's.
func (s *Server) take(mb *member, j join) error {
	switch {
	case j.Token != s.token:
		return cuda.MPSConnectionFailed
	case s.status == machine.MPSFault:
		return cuda.MPSServerNotReady
	case s.undefined:
		return cuda.Unknown
	}
	for _, own := range j.Devices {
		i := slices.IndexFunc(s.devices, func(d cuda.Device) bool { return d.UUID == own.UUID })
		if i < 0 {
			return cuda.InvalidDevice
		}
		d := s.devices[i]
		limits := Limits{UUID: d.UUID, Percentage: min(own.Percentage, s.percentage)}
		if !j.Void {
			limits.Memory = lower(s.memory.of(i, d.UUID), own.Memory)
		}
		mb.uses = append(mb.uses, use{device: i, limits: limits})
	}
	s.clients = append(s.clients, mb)
	s.log.printf("Client {PID: %d} connected", mb.pid)
	return nil
}

// contexts is how many contexts of clients there are on a device.
func (s *Server) contexts(device int) int {
	n := 0
	for _, mb := range s.clients {
		for _, u := range mb.uses {
			if u.device == device {
				n += u.contexts
			}
		}
	}
	return n
}

// MaxContexts is how many contexts of clients a device can have: 16 before Volta, 48 through
// CUDA 13.0 and 60 from 13.1, and of that the part that a compute instance has of
// the GPU's multiprocessors.
func MaxContexts(d cuda.Device, cudaVersion int) int {
	contexts := 48
	switch {
	case d.Major < 7:
		contexts = 16
	case cudaVersion >= 13010:
		contexts = 60
	}
	if d.OfGPU == 0 {
		return contexts
	}
	return max(1, contexts*d.Multiprocessors/d.OfGPU)
}

func (mb *member) handle(r request) (answer reply) {
	s := mb.server
	do := func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return mb.operate(r, &answer)
	}
	var err error
	if r.Op == opAllocate {
		err = s.state.Around(ClientAlloc, gpusOf(s.devices), do)
	} else {
		err = do()
	}
	answer.Code = code(err)
	if errors.Is(err, state.ErrStruck) {
		answer.Code = cuda.OutOfMemory
	}
	return answer
}

// operate does what the client wants of a device.
func (mb *member) operate(r request, answer *reply) error {
	s := mb.server
	switch {
	case mb.ended != 0:
		return mb.ended
	case r.Device < 0 || r.Device >= len(mb.uses):
		return cuda.InvalidDevice
	}
	u := &mb.uses[r.Device]
	switch r.Op {
	case opContext, opAllocate:
		return mb.allocate(u, 0, r.Bytes)
	case opNewContext:
		return mb.allocate(u, 1, 0)
	case opLaunch:
		err := mb.allocate(u, 0, 0)
		u.busy = err == nil
		s.publish()
		return err
	case opSynchronize:
		if u.busy {
			u.busy = false
			s.publish()
		}
		return nil
	case opMemory:
		return mb.memoryInfo(u, answer)
	case opFault:
		s.fault(u.device, mb)
		return cuda.LaunchFailed
	}
	return cuda.InvalidValue
}

// fault is a fatal fault on a device, by a client or from outside. It ends all
// clients that have a context there.
func (s *Server) fault(device int, by *member) {
	if by != nil {
		s.log.printf("Client {PID: %d} encountered a fatal GPU error on device %d", by.pid, device)
	} else {
		s.log.printf("Fatal GPU error on device %d", device)
	}
	for _, mb := range s.clients {
		touched := mb == by || slices.ContainsFunc(mb.uses, func(u use) bool { return u.device == device && u.contexts > 0 })
		if !touched || mb.ended != 0 {
			continue
		}
		mb.ended, mb.hit = cuda.LaunchFailed, true
		s.status = machine.MPSFault
		s.log.printf("Client {PID: %d} is affected", mb.pid)
		if mb != by {
			go func() { _ = mb.send(reply{Code: cuda.LaunchFailed, Ended: true}) }()
		}
	}
	s.publish()
}

// leave forgets a client.
func (s *Server) leave(mb *member) {
	if !slices.Contains(s.clients, mb) {
		return
	}
	s.clients = slices.DeleteFunc(s.clients, func(c *member) bool { return c == mb })
	if mb.ended == 0 && slices.ContainsFunc(mb.uses, func(u use) bool { return u.busy }) {
		s.lose(mb)
	}
	s.log.printf("Client {PID: %d} disconnected. Number of active client contexts is %d.", mb.pid, len(s.clients))
	if s.status == machine.MPSFault && !slices.ContainsFunc(s.clients, func(c *member) bool { return c.hit }) {
		s.status = machine.MPSActive
		s.log.printf("All clients that the fault affected have exited, taking new ones")
	}
	s.publish()
}

// lose is the end of a client that had work on a GPU. NVIDIA calls the state of the
// server undefined from then on. Here all that its clients do fails, while the server
// says that it is active.
func (s *Server) lose(mb *member) {
	m, err := s.state.Snapshot()
	if err != nil || m.MPS.HarmlessKills {
		return
	}
	s.undefined = true
	s.log.printf("gpusim: client {PID: %d} was gone before its work was done", mb.pid)
	for _, other := range s.clients {
		other.end(cuda.Unknown)
	}
}

// end ends all that a client has, and tells it so.
func (mb *member) end(why cuda.Error) {
	if mb.ended != 0 {
		return
	}
	mb.ended = why
	go func() { _ = mb.send(reply{Code: why, Ended: true}) }()
}

// publish writes the server's present entries into the machine.
func (s *Server) publish() {
	err := s.state.Update(func(m *machine.Machine) error { s.enter(m); return nil })
	if err != nil {
		s.log.printf("Cannot account for what is used: %v", err)
	}
}

// enter replaces the server's entries.
func (s *Server) enter(m *machine.Machine) {
	m.Processes = slices.DeleteFunc(m.Processes, func(p machine.Process) bool { return p.Owner == s.owner })
	if m.BootID != s.boot {
		return // watch ends this
	}
	entry := func(d cuda.Device, pid int, name string, kind machine.ProcessKind, memory uint64, sm int) {
		m.Processes = append(m.Processes, machine.Process{
			PID: pid, Name: name, GPU: d.GPU, InstanceID: d.Instance, ComputeID: d.Compute,
			MemoryBytes: memory, SM: sm, Kind: kind, Owner: s.owner, Pipe: PipeDirectory(), Status: s.status,
		})
	}
	for i, d := range s.devices {
		entry(d, os.Getpid(), serverProgram, machine.MPSServer, d.ServerMemory, 0)
		for _, mb := range s.clients {
			for _, u := range mb.uses {
				if u.device == i && u.contexts > 0 {
					entry(d, mb.pid, programOf(mb.pid), machine.MPSClient, u.taken(d), u.sm())
				}
			}
		}
	}
}

// programOf is the name of a process, if it can be told.
func programOf(pid int) string {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(name))
}
