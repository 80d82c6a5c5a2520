// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import resourceapi "k8s.io/api/resource/v1"

// capacityMultiprocessors is the one with which parts of GPUs are compared, beside the memory.
const capacityMultiprocessors = "multiprocessors"

// Part returns which part of its GPU a claim keeps from others, from 0 to 1: of memory or of
// multiprocessors, whichever is more; of shares the part that the scheduler counts. It is 0 where
// the device is not published any more, and for admin access.
func (h *Holding) Part() float64 {
	if h.Device == nil || h.Admin() {
		return 0
	}
	if !h.Device.Shared() {
		return h.Device.Part()
	}
	most := 0.0
	for _, name := range []resourceapi.QualifiedName{CapacityShares, CapacityMemory, CapacitySMPercent} {
		consumed, total := h.Result.ConsumedCapacity[name], h.Device.Published.Capacity[name]
		most = max(most, Ratio(consumed.Value(), total.Value.Value()))
	}
	return h.Device.Part() * min(1, most)
}

// Part returns which part of its GPU the device is, from 0 to 1: of memory or of
// multiprocessors, whichever is more. That of shares is the part that they divide.
func (d *Device) Part() float64 {
	if d.Profile == "" {
		return 1
	}
	all := int64(0)
	for _, other := range d.GPU.Devices {
		all = max(all, other.Capacity(capacityMultiprocessors))
	}
	memory := d.Capacity(CapacityMemory)
	if d.Shared() {
		// What shares are promised may be more than there is.
		memory = 0
	}
	return min(1, max(Ratio(memory, d.GPU.MemoryBytes), Ratio(d.Capacity(capacityMultiprocessors), all)))
}

// Capacity returns how much a device has of a capacity, all shares together, 0 for none.
func (d *Device) Capacity(name resourceapi.QualifiedName) int64 {
	c := d.Published.Capacity[name]
	return c.Value.Value()
}

// Ratio is the part that some is of all, 0 of nothing.
func Ratio(part, all int64) float64 {
	if all <= 0 {
		return 0
	}
	return float64(part) / float64(all)
}
