// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// taint is a reason not to use a device as if nothing was the matter.
type taint struct {
	reason Reason
	value  string
	effect policy.Effect
}

// taintsOf returns the taints of a device, one for each reason and in order. Of several
// conditions with the same reason the gravest counts, so that what is less grave never
// hides it.
func (b board) taintsOf(d Device, conditions []Condition, instances []instance) []taint {
	var all []taint
	if b.withdrawn[d.Name] {
		all = append(all, keepsAway(Withdrawn))
	}
	if d.Static != nil && d.Static.Gone {
		all = append(all, keepsAway(Gone))
	}
	for _, c := range conditions {
		if c.appliesTo(d) {
			all = append(all, taint{c.Reason, c.Value, c.EffectInForce()})
		}
	}
	if d.Partition != nil && d.Static == nil {
		for _, reason := range b.shortages(*d.Partition, instances) {
			all = append(all, keepsAway(reason))
		}
	}
	return gravest(all, len(all))
}

func keepsAway(reason Reason) taint { return taint{reason: reason, effect: policy.EffectNoSchedule} }

// gravest keeps one taint for each reason, and no more of them than that.
func gravest(all []taint, most int) []taint {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b taint) int {
		return cmp.Or(
			a.effect.Compare(b.effect), cmp.Compare(a.reason, b.reason),
			// Numbers in their order.
			cmp.Compare(len(a.value), len(b.value)), cmp.Compare(a.value, b.value))
	})
	var kept []taint
	for _, t := range all {
		same := func(k taint) bool { return k.reason == t.reason }
		if len(kept) < most && !slices.ContainsFunc(kept, same) {
			kept = append(kept, t)
		}
	}
	slices.SortFunc(kept, func(a, b taint) int { return cmp.Compare(a.reason, b.reason) })
	return kept
}

// appliesTo reports whether a condition of the device's GPU holds for the device
// itself. A share has the placement of what is shared.
func (c Condition) appliesTo(d Device) bool {
	switch {
	case c.Kind != "" && c.Kind != d.Kind, c.Undivided && d.Partition != nil:
		return false
	case c.Where == nil:
		return true
	case d.Partition == nil:
		return !c.Exact
	case d.Static != nil && c.Reason == Occupied && d.Partition.Placement == *c.Where:
		// The device is the occupant itself.
		return false
	case c.Exact:
		return d.Partition.Placement == *c.Where && (c.ProfileID == nil || d.Partition.Profile.ID == *c.ProfileID)
	default:
		return d.Partition.Placement.Overlaps(*c.Where)
	}
}

// instance is a GPU instance that exists, and the reason of its condition.
type instance struct {
	PartitionShape
	reason Reason
}

// knownInstances returns the instances whose profile the conditions name, each once. What
// is wrong with exactly one partition keeps nobody from what lies elsewhere.
func (b board) knownInstances(conditions []Condition) []instance {
	var found []instance
	for _, c := range conditions {
		if c.Where == nil || c.ProfileID == nil || c.Exact || b.gpu.MIG == nil {
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

// taints makes the taints of the API, which adds the time. Where it takes fewer, those with the strongest effects are left.
func (o Options) taints(all []taint) []resourceapi.DeviceTaint {
	if o.NoTaints {
		return nil
	}
	if o.NoEffectNone {
		all = slices.DeleteFunc(slices.Clone(all), func(t taint) bool { return t.effect == policy.EffectNone })
	}
	var out []resourceapi.DeviceTaint
	for _, t := range gravest(all, cmp.Or(o.MaxTaints, resourceapi.DeviceTaintsMaxLength)) {
		out = append(out, resourceapi.DeviceTaint{
			Key: o.Driver + "/" + string(t.reason), Value: t.value, Effect: resourceapi.DeviceTaintEffect(t.effect),
		})
	}
	return out
}
