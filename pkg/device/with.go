// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import "slices"

// roomForStatic is how many devices of a GPU's slice are kept free for static
// ones. No GPU holds more than seven partitions at one time, and claims can have
// as many that are gone.
const roomForStatic = 16

// With is the same node with another status, which replaces the one that i has.
// It adds a device for each static partition, and taints. i does not change, and
// neither does the result when the caller changes s afterwards.
//
// What s says about GPUs that the inventory does not have is ignored.
func (i *Inventory) With(s Status) *Inventory {
	s = s.sorted()
	boards := make([]board, len(i.boards))
	for n, b := range i.boards {
		boards[n] = b.with(s.of(b.gpu.PCIAddress))
	}
	return assemble(boards, i.problems)
}

// Keeping is the inventory with those GPUs of an earlier one that it lacks, as
// the earlier one knew them, and the PCI addresses of these GPUs in order. A GPU
// that breaks or falls off the bus must not take devices with it that may be
// allocated; the caller taints them, see [Condition].
//
// The result has no status; [Inventory.With] gives it one. The earlier inventory
// may be nil.
func (i *Inventory) Keeping(earlier *Inventory) (all *Inventory, kept []string) {
	var boards []board
	present := map[string]bool{}
	for _, b := range i.boards {
		present[b.gpu.PCIAddress] = true
		boards = append(boards, b.with(Status{}))
	}
	if earlier != nil {
		for _, b := range earlier.boards {
			if address := b.gpu.PCIAddress; !present[address] {
				kept = append(kept, address)
				boards = append(boards, b.with(Status{}))
			}
		}
	}
	slices.SortFunc(boards, func(a, b board) int { return compareAddresses(a.gpu.PCIAddress, b.gpu.PCIAddress) })
	return assemble(boards, i.problems), kept
}

// of is what a status says about one GPU.
func (s Status) of(pciAddress string) Status {
	var own Status
	for _, static := range s.Static {
		if static.PCIAddress == pciAddress {
			own.Static = append(own.Static, static)
		}
	}
	for _, c := range s.Conditions {
		if c.PCIAddress == pciAddress {
			own.Conditions = append(own.Conditions, c)
		}
	}
	return own
}

// with gives a GPU the status that is about it, which is sorted.
func (b board) with(s Status) board {
	b.static = b.staticDevices(s.Static)
	conditions := s.Conditions
	for _, static := range s.Static {
		if !static.Gone {
			conditions = append(conditions, Condition{Where: &static.Placement, ProfileID: &static.ProfileID, Reason: Occupied})
		}
	}
	instances := b.instancesOf(conditions)
	b.reasons = map[string][]Reason{}
	for _, d := range b.all() {
		if reasons := b.reasonsAgainst(d, conditions, instances); len(reasons) > 0 {
			b.reasons[d.Name] = reasons
		}
	}
	return b
}

// staticDevices are like the devices that could be made in the same places, and
// in the same order. They are never shared.
func (b board) staticDevices(statics []Static) []Device {
	var devices []Device
	for _, p := range b.places {
		at := slices.IndexFunc(statics, func(s Static) bool {
			return p.Partition.Profile.ID == s.ProfileID && p.Partition.Placement == s.Placement
		})
		if at < 0 || !p.static || len(devices) == roomForStatic {
			continue
		}
		own, d := statics[at], p.Device
		d.Name = staticName(d.Name)
		d.Static = &own
		devices = append(devices, d)
	}
	return devices
}
