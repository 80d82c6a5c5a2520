// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// rank is the gravity of an effect; 0 is no taint.
func rank(effect resourceapi.DeviceTaintEffect) int {
	switch effect {
	case "":
		return 0
	case resourceapi.DeviceTaintEffectNone:
		return 1
	case resourceapi.DeviceTaintEffectNoSchedule:
		return 2
	}
	return 3
}

// keepsAway reports whether pods are not started on a device with this effect.
func keepsAway(effect resourceapi.DeviceTaintEffect) bool { return rank(effect) > 1 }

// find returns the taint of a device with a key, or the zero value.
func find(d *resourceapi.Device, key string) (t resourceapi.DeviceTaint) {
	if i := slices.IndexFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == key }); i >= 0 {
		return d.Taints[i]
	}
	return t
}

// settle decides on the taints of a slice that is there: those that are wanted, and those that stay for their time.
func (d *decision) settle(s *slot) {
	if s.have == nil {
		return
	}
	s.target = slices.Clone(s.want.Spec.Devices)
	for i := range s.target {
		device := &s.target[i]
		at := slices.IndexFunc(s.have.Spec.Devices, func(h resourceapi.Device) bool { return h.Name == device.Name })
		if at < 0 {
			continue
		}
		have := &s.have.Spec.Devices[at]
		if d.NoTaints {
			device.Taints = have.Taints // nothing is to be gained
			continue
		}
		d.settleDevice(s, device, have)
	}
}

func (d *decision) settleDevice(s *slot, device, have *resourceapi.Device) {
	wanted := device.Taints
	for _, t := range wanted {
		d.settleWanted(s, device, t, find(have, t.Key))
	}
	device.Taints = nil
	var kept []resourceapi.DeviceTaint
	for _, was := range have.Taints {
		if t := find(&resourceapi.Device{Taints: wanted}, was.Key); rank(t.Effect) < rank(was.Effect) && d.stays(s, device, was) {
			kept = append(kept, was)
		}
	}
	for _, t := range wanted {
		if find(&resourceapi.Device{Taints: kept}, t.Key).Key == "" {
			device.Taints = append(device.Taints, t)
		}
	}
	// What is not wanted any more makes room.
	room := max(0, d.MaxTaints-len(device.Taints))
	slices.SortStableFunc(kept, func(a, b resourceapi.DeviceTaint) int { return cmp.Compare(rank(b.Effect), rank(a.Effect)) })
	device.Taints = append(device.Taints, kept[:min(len(kept), room)]...)
	slices.SortFunc(device.Taints, func(a, b resourceapi.DeviceTaint) int { return cmp.Compare(a.Key, b.Key) })
}

// settleWanted says how urgent a taint is that is wanted, where was is stored.
func (d *decision) settleWanted(s *slot, device *resourceapi.Device, t, was resourceapi.DeviceTaint) {
	switch more, other := rank(t.Effect) > rank(was.Effect), t.Effect == was.Effect && t.Value != was.Value; {
	case more && keepsAway(t.Effect):
		s.grade = urgent
	case other && keepsAway(t.Effect):
		s.grade = max(s.grade, soft) // somebody may tolerate this value only
	case more, other:
		s.tells = true
		since := begin(d.m.untold, d.untold, taintKey{device.Name, t.Key}, d.now)
		if d.due(since+d.p.TellLatest) && d.due(d.m.told(s.want.Name)+d.p.TellOnce) {
			s.grade = max(s.grade, soft)
		}
	}
}

// stays reports whether a taint that is stored, and not wanted any more or not with this effect, stays for its time.
func (d *decision) stays(s *slot, device *resourceapi.Device, was resourceapi.DeviceTaint) bool {
	k := taintKey{device.Name, was.Key}
	switch {
	case !d.due(begin(d.m.unwanted, d.unwanted, k, d.now) + d.m.flaps[k].hold):
		return true
	case keepsAway(was.Effect):
		s.grade, s.since = max(s.grade, soft), min(s.since, d.unwanted[k])
	default:
		s.tells = true
		if d.due(d.m.told(s.want.Name) + d.p.TellOnce) {
			s.grade = max(s.grade, soft)
		}
	}
	return false
}

// begin returns since when something holds: from now on if it did not.
func begin(was, is map[taintKey]Time, k taintKey, now Time) Time {
	since, known := was[k]
	if !known {
		since = now
	}
	is[k] = since
	return since
}

// keepTaintTimes gives taints that are stored already the times that they have there: without a time they would be new ones.
func keepTaintTimes(object, have *resourceapi.ResourceSlice) {
	object.Spec.Devices = slices.Clone(object.Spec.Devices)
	for i := range object.Spec.Devices {
		device := &object.Spec.Devices[i]
		at := slices.IndexFunc(have.Spec.Devices, func(h resourceapi.Device) bool { return h.Name == device.Name })
		if at < 0 {
			continue
		}
		device.Taints = slices.Clone(device.Taints)
		for j := range device.Taints {
			t := &device.Taints[j]
			if was := find(&have.Spec.Devices[at], t.Key); was.Value == t.Value && was.Effect == t.Effect {
				t.TimeAdded = cmp.Or(t.TimeAdded, was.TimeAdded)
			}
		}
	}
}
