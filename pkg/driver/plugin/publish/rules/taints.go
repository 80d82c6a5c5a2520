// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
)

// effects are in the order of gravity, the first one is that of no taint.
var effects = []resourceapi.DeviceTaintEffect{
	"", resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute,
}

func rank(effect resourceapi.DeviceTaintEffect) int { return slices.Index(effects, effect) }

// keepsAway reports whether pods are not started on a device with this effect.
func keepsAway(effect resourceapi.DeviceTaintEffect) bool { return rank(effect) > 1 }

// find returns the taint with a key, or the zero value.
func find(taints []resourceapi.DeviceTaint, key string) (t resourceapi.DeviceTaint) {
	if i := slices.IndexFunc(taints, func(t resourceapi.DeviceTaint) bool { return t.Key == key }); i >= 0 {
		return taints[i]
	}
	return t
}

// named returns the device with a name, or nil.
func named(devices []resourceapi.Device, name string) *resourceapi.Device {
	if i := slices.IndexFunc(devices, func(d resourceapi.Device) bool { return d.Name == name }); i >= 0 {
		return &devices[i]
	}
	return nil
}

// settle decides on the taints of a slice that is there: those that are wanted, and those that stay for their time.
func (d *decision) settle(s *slot) {
	if s.have == nil {
		return
	}
	s.target = slices.Clone(s.want.Spec.Devices)
	for i := range s.target {
		device := &s.target[i]
		switch have := named(s.have.Spec.Devices, device.Name); {
		case have == nil:
		case d.NoTaints:
			device.Taints = have.Taints // nothing is to be gained
		default:
			device.Taints = d.settleDevice(s, device, have.Taints)
		}
	}
	s.same = slices.EqualFunc(s.have.Spec.Devices, s.target, func(is, target resourceapi.Device) bool {
		is.Taints, target.Taints = nil, nil
		return apiequality.Semantic.DeepEqual(is, target)
	})
}

func (d *decision) settleDevice(s *slot, device *resourceapi.Device, have []resourceapi.DeviceTaint) (taints []resourceapi.DeviceTaint) {
	var kept []resourceapi.DeviceTaint
	for _, was := range have {
		if t := find(device.Taints, was.Key); rank(t.Effect) < rank(was.Effect) && d.stays(s, device, was) {
			kept = append(kept, was)
		}
	}
	for _, t := range device.Taints {
		was := find(have, t.Key)
		d.settleWanted(s, device, t, was)
		if t.Value == was.Value && t.Effect == was.Effect {
			t.TimeAdded = was.TimeAdded // without a time it would be a new one
		}
		if find(kept, t.Key).Key == "" {
			taints = append(taints, t)
		}
	}
	// What is not wanted any more makes room.
	slices.SortStableFunc(kept, func(a, b resourceapi.DeviceTaint) int { return cmp.Compare(rank(b.Effect), rank(a.Effect)) })
	taints = append(taints, kept[:min(len(kept), max(0, d.MaxTaints-len(taints)))]...)
	slices.SortFunc(taints, func(a, b resourceapi.DeviceTaint) int { return cmp.Compare(a.Key, b.Key) })
	return taints
}

// settleWanted says how urgent a taint is that is wanted, where was is stored.
func (d *decision) settleWanted(s *slot, device *resourceapi.Device, t, was resourceapi.DeviceTaint) {
	switch more, other := rank(t.Effect) > rank(was.Effect), t.Effect == was.Effect && t.Value != was.Value; {
	case more && keepsAway(t.Effect):
		s.grade = urgent
	case other && keepsAway(t.Effect):
		s.grade = max(s.grade, soft) // somebody may tolerate this value only
	case more, other:
		since := d.m.wantedSince[wantedTaint{taintKey{device.Name, t.Key}, t.Effect}]
		d.inform(s, since+d.m.p.InformLatest)
	}
}

// stays reports whether a taint that is stored, and not wanted any more or not with this effect, stays for its time.
func (d *decision) stays(s *slot, device *resourceapi.Device, was resourceapi.DeviceTaint) bool {
	ended := d.m.ended[taintKey{device.Name, was.Key}]
	switch {
	case ended.again && !d.due(ended.at+d.m.p.Hold):
		return true
	case keepsAway(was.Effect):
		s.grade = max(s.grade, soft)
	default:
		d.inform(s, Never)
	}
	return false
}

// inform has taints without effect written by themselves after a time, unless some of the slice were not long ago.
func (d *decision) inform(s *slot, after Time) {
	s.informs = true
	if d.due(after) && d.due(d.m.last(s.want.Name).informed+d.m.p.InformOnce) {
		s.grade = max(s.grade, soft)
	}
}
