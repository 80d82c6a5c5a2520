// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
)

// reasonsAgainst allocating a device, each once and in order.
func (b board) reasonsAgainst(d Device, conditions []Condition, instances []instance) []Reason {
	var reasons []Reason
	if b.withdrawn[d.Name] {
		reasons = append(reasons, Withdrawn)
	}
	if d.Static != nil && d.Static.Gone {
		reasons = append(reasons, Gone)
	}
	for _, c := range conditions {
		if c.isAbout(d) {
			reasons = append(reasons, c.Reason)
		}
	}
	if d.Partition != nil && d.Static == nil {
		reasons = append(reasons, b.shortages(*d.Partition, instances)...)
	}
	slices.Sort(reasons)
	return slices.Compact(reasons)
}

// isAbout tells whether a condition holds for a device of its GPU because of
// where the device is. A share is where that is of which it is a share.
func (c Condition) isAbout(d Device) bool {
	switch {
	case c.Kind != "" && c.Kind != d.Kind:
		return false
	case c.Where == nil || d.Partition == nil:
		return true
	case d.Static != nil && c.Reason == Occupied && d.Partition.Placement == *c.Where:
		// It is itself what is there.
		return false
	default:
		return d.Partition.Placement.Overlaps(*c.Where)
	}
}

// instance is what lies somewhere on a GPU, and what is said about it.
type instance struct {
	PartitionShape
	reason Reason
}

// instancesOf are those that conditions tell the profile of, each once.
func (b board) instancesOf(conditions []Condition) []instance {
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

// shortages are the reasons of those instances elsewhere on the GPU that leave
// too few engines for a partition, shared or not. The scheduler's counters know only of what
// claims have.
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

// taints makes the API's taints. The time is the API server's to add.
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
