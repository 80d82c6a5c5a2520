// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"slices"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/gpu"
)

// Group is a part of a claim that is made and released under one set of locks: the
// devices of one GPU, or those of several that are in one MPS session.
type Group struct {
	// GPUs are those to be locked, in order. A whole GPU that is only observed needs no
	// lock, so that a group of such devices has none.
	GPUs []string
	// Part is a record of these devices only.
	Part *journal.Record
}

// Groups divides a claim, in the order of its devices.
func Groups(r *journal.Record) []Group {
	var groups []Group
	for _, d := range r.Devices {
		groups = append(groups, Group{GPUs: lockedFor(r, &d), Part: part(r, d)})
	}
	for i := 0; i < len(groups); i++ {
		for j := i + 1; j < len(groups); j++ {
			if !together(&groups[i], &groups[j]) {
				continue
			}
			groups[i].GPUs = gpu.SortPCIAddresses(append(groups[i].GPUs, groups[j].GPUs...))
			groups[i].Part = Merge(groups[i].Part, groups[j].Part)
			groups = slices.Delete(groups, j, j+1)
			j = i // the group has more GPUs now
		}
	}
	for i := range groups {
		groups[i].Part.Devices = inOrderOf(r, groups[i].Part.Devices)
	}
	return groups
}

func together(a, b *Group) bool {
	if len(a.GPUs) == 0 && len(b.GPUs) == 0 {
		return true
	}
	return slices.ContainsFunc(a.GPUs, func(address string) bool { return slices.Contains(b.GPUs, address) })
}

func lockedFor(r *journal.Record, d *journal.Device) []string {
	if d.Admin && d.Partition == nil {
		return nil
	}
	gpus := []string{d.PCIAddress}
	if d.Sharing != nil {
		if s := r.Session(d.Sharing.Session); s != nil {
			gpus = append(gpus, s.PCIAddresses()...)
		}
	}
	return gpu.SortPCIAddresses(gpus)
}

// part returns a record of one device.
func part(r *journal.Record, d journal.Device) *journal.Record {
	one := *r
	one.Devices = []journal.Device{d}
	one.Sessions = nil
	for _, s := range r.Sessions {
		if d.In(s.ID) {
			one.Sessions = append(one.Sessions, s)
		}
	}
	return one.Clone()
}

// PartOf returns what a record says of the devices of a group.
func PartOf(r *journal.Record, g Group) *journal.Record {
	var parts []*journal.Record
	for i := range g.Part.Devices {
		if d := r.Device(g.Part.Devices[i].Key()); d != nil {
			parts = append(parts, part(r, *d))
		}
	}
	if len(parts) == 0 {
		return nil
	}
	return Merge(parts...)
}

// Merge returns a record with the devices and sessions of all parts. It has nothing in
// common with them.
func Merge(parts ...*journal.Record) *journal.Record {
	whole := parts[0].Clone()
	for _, p := range parts[1:] {
		p = p.Clone()
		for _, d := range p.Devices {
			whole.Add(d)
		}
		for _, s := range p.Sessions {
			if whole.Session(s.ID) == nil {
				whole.Sessions = append(whole.Sessions, s)
			}
		}
	}
	return whole
}

func inOrderOf(r *journal.Record, devices []journal.Device) []journal.Device {
	var ordered []journal.Device
	for i := range r.Devices {
		at := slices.IndexFunc(devices, func(d journal.Device) bool { return d.Key() == r.Devices[i].Key() && d.Admin == r.Devices[i].Admin })
		if at >= 0 {
			ordered = append(ordered, devices[at])
		}
	}
	return ordered
}

// Steps returns the steps of a group in the order in which they are applied: devices,
// then what shares them.
func (k *Kit) Steps(part *journal.Record) []Step {
	var steps []Step
	for i := range part.Devices {
		steps = append(steps, k.deviceStep(&part.Devices[i]))
	}
	for i := range part.Sessions {
		s := &part.Sessions[i]
		steps = append(steps, Step{Name: "session " + s.ID, Keys: keysIn(part, s.ID), Effect: session{k, s.ID}})
	}
	for i := range part.Devices {
		if d := &part.Devices[i]; d.Interval() != "" {
			steps = append(steps, Step{Name: "interval " + d.Key(), Keys: []string{d.Key()}, Effect: interval{k, d.Key()}})
		}
	}
	return steps
}

func (k *Kit) deviceStep(d *journal.Device) Step {
	kind, effect := "whole", Effect(whole{k, d.Key()})
	switch {
	case d.Owned():
		kind, effect = "partition", ownedPartition{k, d.Key()}
	case d.Partition != nil:
		kind, effect = "existing", existing{k, d.Key()}
	}
	return Step{Name: kind + " " + d.Key(), Keys: []string{d.Key()}, Effect: effect}
}

func keysIn(part *journal.Record, session string) []string {
	var keys []string
	for i := range part.Devices {
		if d := &part.Devices[i]; d.In(session) {
			keys = append(keys, d.Key())
		}
	}
	return keys
}

// Releasable reports whether a device has an effect that has to be undone.
func Releasable(d *journal.Device) bool { return d.Owned() || d.Sharing != nil }
