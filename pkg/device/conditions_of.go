// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// ConditionsOf returns the conditions of the status that hold for a device itself, in a fixed
// order. Of a device that the inventory does not have nothing is known. mps says that processes
// use it through MPS, which a claim can also have on a GPU or a partition of its own: then what
// concerns MPS shares concerns it, too.
//
// These are fewer than the reasons of its taints: a partition is tainted, too, where others
// leave too few engines to make it, which is nothing to one that exists. An observer uses no
// part of its GPU, so that conditions of a part do not concern it.
func (i *Inventory) ConditionsOf(name string, mps bool) []Condition {
	d, b := i.find(name)
	if b == nil {
		return nil
	}
	share := d
	share.Kind = MPS
	return slices.DeleteFunc(cloneConditions(b.conditions), func(c Condition) bool {
		applies := c.appliesTo(d) || mps && c.appliesTo(share)
		return d.Kind == Observer && c.Where != nil || !applies
	})
}

// AttributesOf returns the attributes with which a device is published, or nil if the inventory
// does not have it. The caller owns the map.
func (i *Inventory) AttributesOf(name string) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	d, b := i.find(name)
	if b == nil {
		return nil
	}
	return maps.Clone(b.attributes(d))
}

// find returns a device and its GPU, or nil.
func (i *Inventory) find(name string) (Device, *board) {
	d, found := i.Lookup(name)
	if !found {
		return Device{}, nil
	}
	at := slices.IndexFunc(i.boards, func(b board) bool { return b.gpu == d.GPU })
	if at < 0 {
		return Device{}, nil
	}
	return d, &i.boards[at]
}

// cloneConditions copies what the conditions point to as well.
func cloneConditions(conditions []Condition) []Condition {
	copied := slices.Clone(conditions)
	for i := range copied {
		c := &copied[i]
		if c.Where != nil {
			c.Where = ptr.To(*c.Where)
		}
		if c.ProfileID != nil {
			c.ProfileID = ptr.To(*c.ProfileID)
		}
	}
	return copied
}
