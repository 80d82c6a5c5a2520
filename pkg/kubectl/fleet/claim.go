// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"encoding/json"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
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

// Ask returns what asked for a holding in its claim or a copy of it, or nil.
func (h *Holding) Ask(c *resourceapi.ResourceClaim) *Ask {
	for _, a := range AsksOf(&c.Spec.Devices) {
		if a.Name == h.Result.Request {
			return &a
		}
	}
	return nil
}

// Compared returns the attribute by which a constraint compares devices, or "".
func Compared(c *resourceapi.DeviceConstraint) string {
	return string(cmp.Or(ptr.Deref(c.MatchAttribute, ""), ptr.Deref(c.DistinctAttribute, "")))
}

// Unqualified returns a name without its domain.
func Unqualified(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

// Results returns the devices of a driver that a claim has, or with "" of all drivers.
func Results(c *resourceapi.ResourceClaim, driver string) (all []*resourceapi.DeviceRequestAllocationResult) {
	if c.Status.Allocation == nil {
		return nil
	}
	for i := range c.Status.Allocation.Devices.Results {
		if r := &c.Status.Allocation.Devices.Results[i]; driver == "" || r.Driver == driver {
			all = append(all, r)
		}
	}
	return all
}

// IsMPS reports whether a device of the driver is an MPS share, by its name.
func IsMPS(r *resourceapi.DeviceRequestAllocationResult) bool {
	return strings.Contains(r.Device, TypeMPS)
}

// AllocatedAt returns since when a claim has its devices.
func AllocatedAt(c *resourceapi.ResourceClaim) metav1.Time {
	return ptr.Deref(c.Status.Allocation.AllocationTimestamp, c.CreationTimestamp)
}

// NoClaims says that none has a device, of those that were looked at: all that can be read, or those of a namespace.
func NoClaims(everywhere bool) string {
	if everywhere {
		return "No claim that was looked at has a device of the driver."
	}
	return "No claim that was looked at has a device of the driver; -A looks at all namespaces."
}

// Live returns what the driver says of the device while it is prepared, or nil where it says
// nothing, or says it in words of a version that is not known.
func (h *Holding) Live() *api.DeviceStatus {
	if h.Status == nil || h.Status.Data == nil {
		return nil
	}
	var s api.DeviceStatus
	if err := json.Unmarshal(h.Status.Data.Raw, &s); err != nil || s.APIVersion != api.StatusVersion {
		return nil
	}
	return &s
}

// NotReady returns the condition with which the driver says that containers cannot use the
// device, or nil.
func (h *Holding) NotReady() *metav1.Condition {
	conditions := ptr.Deref(h.Status, resourceapi.AllocatedDeviceStatus{}).Conditions
	if c := meta.FindStatusCondition(conditions, "Ready"); c != nil && c.Status != metav1.ConditionTrue {
		return c
	}
	return nil
}
