// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// clone returns a deep copy. A shallow one would share nodes, mounts and hooks with the
// cache, and the specs package has no function for it.
func clone(e *specs.ContainerEdits) specs.ContainerEdits {
	return specs.ContainerEdits{
		Env:            slices.Clone(e.Env),
		DeviceNodes:    cloneAll(e.DeviceNodes, cloneNode),
		NetDevices:     cloneAll(e.NetDevices, nil),
		Hooks:          cloneAll(e.Hooks, cloneHook),
		Mounts:         cloneAll(e.Mounts, func(m *specs.Mount) { m.Options = slices.Clone(m.Options) }),
		IntelRdt:       clonePointer(e.IntelRdt, func(r *specs.IntelRdt) { r.Schemata = slices.Clone(r.Schemata) }),
		AdditionalGIDs: slices.Clone(e.AdditionalGIDs),
	}
}

func cloneNode(n *specs.DeviceNode) {
	n.FileMode = clonePointer(n.FileMode, nil)
	n.UID = clonePointer(n.UID, nil)
	n.GID = clonePointer(n.GID, nil)
}

func cloneHook(h *specs.Hook) {
	h.Args = slices.Clone(h.Args)
	h.Env = slices.Clone(h.Env)
	h.Timeout = clonePointer(h.Timeout, nil)
}

// cloneAll copies the elements; deepen replaces what they point to.
func cloneAll[T any](list []*T, deepen func(*T)) []*T {
	if list == nil {
		return nil
	}
	copied := make([]*T, len(list))
	for i, element := range list {
		copied[i] = clonePointer(element, deepen)
	}
	return copied
}

func clonePointer[T any](p *T, deepen func(*T)) *T {
	if p == nil {
		return nil
	}
	v := *p
	if deepen != nil {
		deepen(&v)
	}
	return &v
}
