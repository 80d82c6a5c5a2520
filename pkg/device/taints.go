// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
)

// taintReasons returns the reasons not to allocate a device, each once and in order.
func (b board) taintReasons(d Device, conditions []Condition, instances []instance) []Reason {
	var reasons []Reason
	if b.withdrawn[d.Name] {
		reasons = append(reasons, Withdrawn)
	}
	if d.Static != nil && d.Static.Gone {
		reasons = append(reasons, Gone)
	}
	for _, c := range conditions {
		if c.appliesTo(d) {
			reasons = append(reasons, c.Reason)
		}
	}
	if d.Partition != nil && d.Static == nil {
		reasons = append(reasons, b.shortages(*d.Partition, instances)...)
	}
	slices.Sort(reasons)
	return slices.Compact(reasons)
}

// appliesTo reports whether a condition of the device's GPU holds for the device
// itself. A share has the placement of what is shared.
func (c Condition) appliesTo(d Device) bool {
	switch {
	case c.Kind != "" && c.Kind != d.Kind:
		return false
	case c.Where == nil || d.Partition == nil:
		return true
	case d.Static != nil && c.Reason == Occupied && d.Partition.Placement == *c.Where:
		// The device is the occupant itself.
		return false
	default:
		return d.Partition.Placement.Overlaps(*c.Where)
	}
}

// instance is a GPU instance that exists, and the reason of its condition.
type instance struct {
	PartitionShape
	reason Reason
}

// knownInstances returns the instances whose profile the conditions name, each once.
func (b board) knownInstances(conditions []Condition) []instance {
	var found []instance
	for _, c := range conditions {
		if c.Where == nil || c.ProfileID == nil || b.gpu.MIG == nil {
			continue
		}
		at := slices.IndexFunc(b.gpu.MIG.Profiles, func(p gpu.Profile) bool { return p.ID == *c.ProfileID })
		known := slices.ContainsFunc(found, func(i instance) bool { return i.Placement == *c.Where })
		if at >= 0 && !known {
			found = append(found, instance{PartitionShape{Profile: b.gpu.MIG.Profiles[at], Placement: *c.Where}, c.Reason})
		}
	}
	return found
}

// shortages returns the reasons of the instances elsewhere on the GPU that leave too
// few engines for a partition, shared or not. The scheduler's counters cover only
// what claims have.
func (b board) shortages(s PartitionShape, instances []instance) []Reason {
	var reasons []Reason
	for _, limit := range b.counters.limits {
		need := limit.use(s.Profile)
		if need == 0 {
			continue
		}
		left := limit.total - need
		var users []Reason
		for _, other := range instances {
			if use := limit.use(other.Profile); use > 0 && !other.Placement.Overlaps(s.Placement) {
				left -= use
				users = append(users, other.reason)
			}
		}
		if left < 0 {
			reasons = append(reasons, users...)
		}
	}
	return reasons
}

// taints makes the taints of the API. The API server adds the time.
func taints(driver string, reasons []Reason) []resourceapi.DeviceTaint {
	var out []resourceapi.DeviceTaint
	for _, reason := range reasons {
		out = append(out, resourceapi.DeviceTaint{
			Key:    driver + "/" + string(reason),
			Effect: resourceapi.DeviceTaintEffectNoSchedule,
		})
	}
	return out
}
