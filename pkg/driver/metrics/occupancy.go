// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"slices"
	"strconv"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/usage"
	"github.com/partage-dev/partage/pkg/gpu"
)

// Roles of a GPU.
const (
	roleFree        = "free"
	roleWhole       = "whole"
	rolePartitioned = "partitioned"
	roleMPS         = "mps"
	roleTimeSlice   = "timeslice"
	roleUnavailable = "unavailable"
)

// States of a device.
const (
	stateFree      = "free"
	stateAllocated = "allocated"
	stateBlocked   = "blocked"
	stateTainted   = "tainted"
)

// occupancy is who has what of one GPU.
type occupancy struct {
	gpu       *device.Summary
	held      []*usage.Claim
	role      string
	allocated uint64
}

func occupancyOf(s *snapshot, g *device.Summary) *occupancy {
	o := &occupancy{gpu: g, role: roleFree}
	for i := range s.Claims {
		if s.Claims[i].PCIAddress == g.GPU.PCIAddress {
			o.held = append(o.held, &s.Claims[i])
		}
	}
	for _, c := range o.held {
		o.role = roleOf(c)
		switch {
		case c.RequestedBytes != nil:
			o.allocated += uint64(max(0, *c.RequestedBytes))
		case c.MemoryLimitBytes > 0:
			o.allocated += uint64(c.MemoryLimitBytes)
		}
	}
	o.allocated = min(o.allocated, g.GPU.Resources.MemoryBytes)
	statics := slices.ContainsFunc(g.Devices, func(d device.Device) bool { return d.Static != nil && !d.Static.Gone })
	if o.role == roleFree && statics {
		o.role = rolePartitioned
	}
	for _, c := range s.status.Conditions {
		// A cordoned GPU that is in use keeps its role.
		if c.PCIAddress == g.GPU.PCIAddress && (unhealthy(c) || c.Reason == device.Cordoned && o.role == roleFree) {
			o.role = roleUnavailable
		}
	}
	return o
}

func roleOf(c *usage.Claim) string {
	switch {
	case c.Partition != nil:
		return rolePartitioned
	case c.Kind == device.MPS:
		return roleMPS
	case c.Kind == device.TimeSlice:
		return roleTimeSlice
	}
	return roleWhole
}

// slices shows who has each memory slice.
func (o *occupancy) slices(e *emitter) {
	total := 1
	if o.gpu.GPU.MIG != nil {
		total = max(1, o.gpu.GPU.MIG.MemorySlices)
	}
	address := o.gpu.GPU.PCIAddress
	for n := range total {
		at, slice := gpu.Placement{Start: n, Size: 1}, strconv.Itoa(n)
		holder := slices.IndexFunc(o.held, func(c *usage.Claim) bool { return c.Partition == nil || c.Partition.Placement.Overlaps(at) })
		static := slices.IndexFunc(o.gpu.Devices, func(d device.Device) bool {
			return d.Static != nil && !d.Static.Gone && d.Partition.Placement.Overlaps(at)
		})
		switch {
		case holder >= 0 && o.held[holder].Kind.IsShare():
			e.emit(gpuMemorySlice, 1, address, slice, "", "", o.held[holder].Device)
		case holder >= 0:
			c := o.held[holder]
			e.emit(gpuMemorySlice, 1, address, slice, c.Claim.Namespace, c.Claim.Name, c.Device)
		case static >= 0:
			e.emit(gpuMemorySlice, 1, address, slice, "", "", o.gpu.Devices[static].Name)
		default:
			e.emit(gpuMemorySlice, 0, address, slice, "", "", "")
		}
	}
}

// deviceKey is what devices are counted by.
type deviceKey struct {
	kind    device.Kind
	profile string
}

// devices counts the published devices by kind, profile and state.
func (o *occupancy) devices(e *emitter) {
	count := map[deviceKey]map[string]int{}
	for _, d := range o.gpu.Devices {
		of := deviceKey{kind: d.Kind}
		if d.Partition != nil {
			of.profile = d.Partition.Profile.Name
		}
		if count[of] == nil {
			count[of] = map[string]int{}
		}
		count[of][o.stateOf(d)]++
	}
	for of, states := range count {
		for _, state := range []string{stateFree, stateAllocated, stateBlocked, stateTainted} {
			e.emit(devices, float64(states[state]), o.gpu.GPU.PCIAddress, string(of.kind), of.profile, state)
		}
	}
}

func (o *occupancy) stateOf(d device.Device) string {
	blocked := false
	for _, c := range o.held {
		if c.Device == d.Name {
			return stateAllocated
		}
		blocked = blocked || d.Partition == nil || c.Partition == nil || c.Partition.Placement.Overlaps(d.Partition.Placement)
	}
	switch {
	case o.gpu.Tainted[d.Name]:
		return stateTainted
	case blocked:
		return stateBlocked
	}
	return stateFree
}
