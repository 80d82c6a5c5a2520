// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"reflect"
	"slices"
)

// reservedForStatic is how many places in a GPU's slice are kept free for static
// devices. No GPU holds more than seven partitions at the same time, and claims can
// have as many that are gone.
const reservedForStatic = 15

// With returns the inventory with another status, which adds a device for each
// static partition, and taints. It replaces the status that i has. i does not
// change, and neither does the result when the caller changes s afterwards. For the
// same status as last time the result is the same, so that nobody publishes it again.
//
// Entries about GPUs that the inventory does not have are ignored.
func (i *Inventory) With(s Status) *Inventory {
	s = s.Sorted()
	if last := i.last.Load(); last != nil && reflect.DeepEqual(last.status, s) {
		return last.inventory
	}
	boards := make([]board, len(i.boards))
	for n, b := range i.boards {
		boards[n] = b.with(s.of(b.gpu.PCIAddress))
	}
	made := &withStatus{status: s, inventory: assemble(boards, i.problems)}
	i.last.Store(made)
	return made.inventory
}

// of returns the entries about one GPU.
func (s Status) of(pciAddress string) Status {
	return Status{
		Static:     slices.DeleteFunc(slices.Clone(s.Static), func(own Static) bool { return own.PCIAddress != pciAddress }),
		Conditions: slices.DeleteFunc(slices.Clone(s.Conditions), func(own Condition) bool { return own.PCIAddress != pciAddress }),
	}
}

// with applies the sorted status of this GPU.
func (b board) with(s Status) board {
	b.static = b.staticDevices(s.Static)
	conditions := slices.Clone(s.Conditions)
	for _, static := range s.Static {
		if !static.Gone {
			conditions = append(conditions, Condition{Where: &static.Placement, ProfileID: &static.ProfileID, Reason: Occupied})
		}
	}
	instances := b.knownInstances(conditions)
	b.taints = map[string][]taint{}
	for _, d := range b.all() {
		if taints := b.taintsOf(d, conditions, instances); len(taints) > 0 {
			b.taints[d.Name] = taints
		}
	}
	return b
}

// staticDevices returns devices like those that could be made in the same places,
// in the same order. They are never shared.
func (b board) staticDevices(statics []Static) []Device {
	var devices []Device
	for _, p := range b.places {
		at := slices.IndexFunc(statics, func(s Static) bool {
			return p.Partition.Profile.ID == s.ProfileID && p.Partition.Placement == s.Placement
		})
		if at < 0 || !p.static || len(devices) == reservedForStatic {
			continue
		}
		own, d := statics[at], p.Device
		d.Name = staticName(d.Name)
		d.Static = &own
		devices = append(devices, d)
	}
	return devices
}
