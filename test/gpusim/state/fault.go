// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

import (
	"fmt"
	"time"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// AddFault appends a fault to the machine's list and returns its new ID, one
// more than the largest that is there. What f.ID says does not matter.
func AddFault(m *machine.Machine, f machine.Fault) int {
	f.ID = 1
	for i := range m.Faults {
		f.ID = max(f.ID, m.Faults[i].ID+1)
	}
	m.Faults = append(m.Faults, f)
	return f.ID
}

// RemoveFault removes a fault from the machine's list, and reports whether it was
// there.
func RemoveFault(m *machine.Machine, id int) bool {
	for i := range m.Faults {
		if m.Faults[i].ID == id {
			m.Faults = append(m.Faults[:i], m.Faults[i+1:]...)
			return true
		}
	}
	return false
}

// faults writes the machine's faults. One whose ID was there before keeps its
// serial, and so its counts, also through a reboot.
func (e *encoder) faults(c, before *C.struct_gs_machine, m *machine.Machine) {
	old := map[int]C.uint64_t{}
	taken := map[C.uint64_t]bool{} // places of counts
	c.next_fault = 1
	if before != nil {
		c.next_fault = before.next_fault
		for i := range int(before.fault_count) {
			serial := before.faults[i].serial
			old[int(before.faults[i].id)] = serial
			taken[serial%C.GS_FAULT_COUNTS] = true
		}
	}
	if !e.fits("faults", len(m.Faults), C.GS_MAX_FAULTS) {
		return
	}
	c.fault_count = C.int32_t(len(m.Faults))
	seen := map[int]bool{}
	for i := range m.Faults {
		f := &m.Faults[i]
		if seen[f.ID] {
			e.fail("two faults have the ID %d", f.ID)
		}
		seen[f.ID] = true
		serial, kept := old[f.ID]
		if !kept {
			for taken[c.next_fault%C.GS_FAULT_COUNTS] {
				c.next_fault++
			}
			serial = c.next_fault
			c.next_fault++
		}
		c.faults[i].serial = serial
		e.fault(&c.faults[i], f, len(m.GPUs))
	}
}

func (e *encoder) fault(c *C.struct_gs_fault, f *machine.Fault, gpus int) {
	what := fmt.Sprintf("fault %d: ", f.ID)
	if f.ID < 1 {
		e.fail("%sthe ID is less than 1", what)
	}
	if f.Function == "" {
		e.fail("%sfunction is empty", what)
	}
	if f.GPU < -1 || f.GPU >= gpus {
		e.fail("%sGPU %d of %d", what, f.GPU, gpus)
	}
	if !(f.Probability >= 0 && f.Probability <= 1) { // also refuses what is no number
		e.fail("%sprobability %v is not between 0 and 1", what, f.Probability)
	}
	if f.Effect < 0 || f.Effect >= C.GS_EFFECTS {
		e.fail("%seffect %d is unknown", what, f.Effect)
	}
	e.text(c.function[:], what+"function", f.Function)
	c.id = e.number(what+"ID", f.ID)
	c.gpu = e.number(what+"GPU", f.GPU)
	c.skip = e.natural(what+"skip", f.Skip)
	c.times = e.natural(what+"times", f.Times)
	c.probability = C.double(f.Probability)
	c.delay = e.duration(what+"delay", f.Delay)
	c.hang = flag(f.Hang)
	c.all_gpus = flag(f.AllGPUs)
	c.effect = C.int32_t(f.Effect)
	c.code = e.number(what+"code", f.Code)
}

func (e *encoder) latencies(c *C.struct_gs_machine, m *machine.Machine) {
	if !e.fits("latencies", len(m.Latencies), C.GS_MAX_LATENCIES) {
		return
	}
	c.latency_count = C.int32_t(len(m.Latencies))
	seen := map[string]bool{}
	for i := range m.Latencies {
		l := &m.Latencies[i]
		what := fmt.Sprintf("latency %d: ", i)
		if l.Function == "" || seen[l.Function] {
			e.fail("%sfunction %q is empty or has a latency already", what, l.Function)
		}
		seen[l.Function] = true
		e.text(c.latencies[i].function[:], what+"function", l.Function)
		c.latencies[i].base = e.duration(what+"base", l.Base)
		c.latencies[i].per_instance = e.duration(what+"per instance", l.PerInstance)
		c.latencies[i].exclusive = flag(l.Exclusive)
	}
}

func (e *encoder) natural(what string, n int) C.int32_t {
	if n < 0 {
		e.fail("%s %d is negative", what, n)
	}
	return e.number(what, n)
}

func (e *encoder) duration(what string, d time.Duration) C.int64_t {
	if d < 0 {
		e.fail("%s %v is negative", what, d)
	}
	return C.int64_t(d)
}

func decodeFaults(h *C.struct_gs_handle, c *C.struct_gs_machine) []machine.Fault {
	var faults []machine.Fault
	for i := range int(c.fault_count) {
		faults = append(faults, decodeFault(h, &c.faults[i]))
	}
	return faults
}

func decodeFault(h *C.struct_gs_handle, f *C.struct_gs_fault) machine.Fault {
	var seen, struck C.uint64_t
	C.gs_fault_counts(h, f.serial, &seen, &struck)
	return machine.Fault{
		ID: int(f.id), Function: C.GoString(&f.function[0]), GPU: int(f.gpu), Skip: int(f.skip), Times: int(f.times),
		Probability: float64(f.probability), Delay: time.Duration(f.delay), Hang: f.hang != 0, AllGPUs: f.all_gpus != 0,
		Effect: machine.Effect(f.effect), Code: int(f.code), Seen: uint64(seen), Struck: uint64(struck),
	}
}

func decodeLatencies(c *C.struct_gs_machine) []machine.Latency {
	var latencies []machine.Latency
	for i := range int(c.latency_count) {
		l := &c.latencies[i]
		latencies = append(latencies, machine.Latency{
			Function: C.GoString(&l.function[0]), Base: time.Duration(l.base), PerInstance: time.Duration(l.per_instance),
			Exclusive: l.exclusive != 0,
		})
	}
	return latencies
}
