// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// Ask is a request of a claim, or one alternative of a request. It points into the claim.
type Ask struct {
	// Position identifies it in any copy of the claim: the request, and the alternative or -1.
	Position [2]int
	// Name is that of the request or REQUEST/ALTERNATIVE, as in the results of an allocation.
	Name        string
	Class       *string
	Mode        *resourceapi.DeviceAllocationMode
	Count       *int64
	Admin       bool
	Selectors   *[]resourceapi.DeviceSelector
	Tolerations *[]resourceapi.DeviceToleration
	Capacity    **resourceapi.CapacityRequirements
	// Object is the DeviceRequest or DeviceSubRequest.
	Object any
}

// AsksOf returns all that a claim asks for.
func AsksOf(spec *resourceapi.DeviceClaim) []Ask {
	var out []Ask
	for i := range spec.Requests {
		r := &spec.Requests[i]
		if e := r.Exactly; e != nil {
			out = append(out, Ask{
				[2]int{i, -1}, r.Name, &e.DeviceClassName, &e.AllocationMode, &e.Count, ptr.Deref(e.AdminAccess, false),
				&e.Selectors, &e.Tolerations, &e.Capacity, r,
			})
		}
		for j := range r.FirstAvailable {
			s := &r.FirstAvailable[j]
			out = append(out, Ask{
				[2]int{i, j}, r.Name + "/" + s.Name, &s.DeviceClassName, &s.AllocationMode, &s.Count, false,
				&s.Selectors, &s.Tolerations, &s.Capacity, s,
			})
		}
	}
	return out
}
