// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

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
