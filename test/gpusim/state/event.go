// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

// #include "state.h"
import "C"

import (
	"math/bits"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// AddEvent lets something happen to a GPU. What e.Serial says does not matter. Who has
// registered for such an event gets it when the change of the machine is committed.
func AddEvent(m *machine.Machine, e machine.Event) {
	e.Serial = 0
	m.Events = append(m.Events, e)
}

// events writes the events that are new, and those of the others that there is room for.
func (e *encoder) events(c, before *C.struct_gs_machine, m *machine.Machine) {
	c.next_event = 1
	if before != nil {
		c.next_event = before.next_event
	}
	for i := range m.Events {
		event := &m.Events[i]
		if event.GPU < 0 || event.GPU >= len(m.GPUs) {
			e.fail("event on GPU %d of %d", event.GPU, len(m.GPUs))
		}
		if bits.OnesCount64(event.Type) != 1 {
			e.fail("event of type %#x: it has to be one type", event.Type)
		}
		serial := C.uint64_t(event.Serial)
		if serial == 0 {
			serial = c.next_event
		}
		c.next_event = max(c.next_event, serial+1)
		c.events[serial%C.GS_MAX_EVENTS] = C.struct_gs_event{
			_type: C.uint64_t(event.Type), data: C.uint64_t(event.XID), gpu: e.number("GPU", event.GPU),
			instance_id: e.number("GPU instance id", event.InstanceID),
			compute_id:  e.number("compute instance id", event.ComputeID),
		}
	}
}

func decodeEvents(c *C.struct_gs_machine) []machine.Event {
	var events []machine.Event
	next := uint64(c.next_event)
	for serial := max(1, next-min(next, C.GS_MAX_EVENTS)); serial < next; serial++ {
		event := &c.events[serial%C.GS_MAX_EVENTS]
		if event._type == 0 {
			continue // forgotten, as by a reboot
		}
		events = append(events, machine.Event{
			Serial: serial, GPU: int(event.gpu), Type: uint64(event._type), XID: uint64(event.data),
			InstanceID: int(event.instance_id), ComputeID: int(event.compute_id),
		})
	}
	return events
}
