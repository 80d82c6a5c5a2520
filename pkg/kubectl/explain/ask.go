// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// ask is a request of a claim, or one alternative of a request.
type ask struct {
	claim *resourceapi.ResourceClaim
	// position identifies it in any copy of the claim.
	position position
	// name is that of the request or REQUEST/ALTERNATIVE.
	name        string
	class       *string
	mode        resourceapi.DeviceAllocationMode
	count       *int64
	admin       bool
	selectors   *[]resourceapi.DeviceSelector
	tolerations *[]resourceapi.DeviceToleration
	capacity    **resourceapi.CapacityRequirements
}

type position struct {
	request int
	// alternative is -1 for a request without alternatives.
	alternative int
}

// asksOf returns all that a claim asks for. They point into the claim.
func asksOf(c *resourceapi.ResourceClaim) []ask {
	var out []ask
	for i := range c.Spec.Devices.Requests {
		r := &c.Spec.Devices.Requests[i]
		if e := r.Exactly; e != nil {
			out = append(out, ask{
				claim: c, position: position{i, -1}, name: r.Name, class: &e.DeviceClassName, mode: e.AllocationMode, count: &e.Count,
				admin: ptr.Deref(e.AdminAccess, false), selectors: &e.Selectors, tolerations: &e.Tolerations, capacity: &e.Capacity,
			})
		}
		for j := range r.FirstAvailable {
			s := &r.FirstAvailable[j]
			out = append(out, ask{
				claim: c, position: position{i, j}, name: r.Name + "/" + s.Name, class: &s.DeviceClassName, mode: s.AllocationMode, count: &s.Count,
				selectors: &s.Selectors, tolerations: &s.Tolerations, capacity: &s.Capacity,
			})
		}
	}
	return out
}

// invalid says what the API server refuses in a claim that it has not got yet. It is not all that the
// API server looks at, but all that the allocator takes for granted.
func invalid(c *resourceapi.ResourceClaim) []string {
	var out []string
	requests := c.Spec.Devices.Requests
	if len(requests) > resourceapi.DeviceRequestsMaxSize {
		out = append(out, fmt.Sprintf("spec.devices.requests has %d entries, at most %d are allowed", len(requests), resourceapi.DeviceRequestsMaxSize))
	}
	for i := range requests {
		r := &requests[i]
		switch n := len(r.FirstAvailable); {
		case (r.Exactly == nil) == (n == 0):
			out = append(out, fmt.Sprintf("request %s has to have either exactly or firstAvailable", r.Name))
		case n > resourceapi.FirstAvailableDeviceRequestMaxSize:
			out = append(out, fmt.Sprintf("request %s has %d alternatives in firstAvailable, at most %d are allowed", r.Name, n, resourceapi.FirstAvailableDeviceRequestMaxSize))
		}
	}
	for _, a := range asksOf(c) {
		switch {
		case a.mode != resourceapi.DeviceAllocationModeExactCount && a.mode != resourceapi.DeviceAllocationModeAll:
			out = append(out, fmt.Sprintf("allocationMode %s of request %s has to be ExactCount or All", a.mode, a.name))
		case a.mode == resourceapi.DeviceAllocationModeExactCount && *a.count < 1:
			out = append(out, fmt.Sprintf("count %d of request %s has to be 1 or more", *a.count, a.name))
		}
	}
	return out
}

// changed returns a copy of the claim in which the ask is different.
func (a ask) changed(change func(ask)) *resourceapi.ResourceClaim {
	c := a.claim.DeepCopy()
	for _, b := range asksOf(c) {
		if b.position == a.position {
			change(b)
		}
	}
	return c
}

// complete sets what the API server sets where a claim leaves it out.
func complete(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c = c.DeepCopy()
	for i := range c.Spec.Devices.Requests {
		r := &c.Spec.Devices.Requests[i]
		if r.Exactly != nil {
			setDefaults(&r.Exactly.AllocationMode, &r.Exactly.Count, r.Exactly.Tolerations)
		}
		for j := range r.FirstAvailable {
			s := &r.FirstAvailable[j]
			setDefaults(&s.AllocationMode, &s.Count, s.Tolerations)
		}
	}
	return c
}

func setDefaults(mode *resourceapi.DeviceAllocationMode, count *int64, tolerations []resourceapi.DeviceToleration) {
	if *mode == "" {
		*mode = resourceapi.DeviceAllocationModeExactCount
	}
	if *mode == resourceapi.DeviceAllocationModeExactCount && *count == 0 {
		*count = 1
	}
	for i := range tolerations {
		if tolerations[i].Operator == "" {
			tolerations[i].Operator = resourceapi.DeviceTolerationOpEqual
		}
	}
}

// wants says how many devices are wanted, for people.
func (a ask) wants() string {
	switch {
	case a.mode == resourceapi.DeviceAllocationModeAll:
		return "all devices"
	case *a.count == 1:
		return "1 device"
	default:
		return fmt.Sprintf("%d devices", *a.count)
	}
}
