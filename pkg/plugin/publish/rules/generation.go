// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
)

// chooseGeneration decides whether slices can be changed one by one.
//
// The scheduler uses a pool when all slices of its newest generation are there, by their count. A change of one slice leaves
// the pool complete. The pool gets another generation when it has another number of slices, or when counters change together
// with devices.
//
// An older API server of a mixed control plane stores what is created without some of its fields, which an update of a slice
// that has them keeps. Devices without their counters could be allocated although they exclude each other, so that no slice
// of devices completes a pool when it is created: the slices of counters come last, and a pool without a counter is invalid
// for the scheduler. One that is missing from a complete pool comes in a new generation, before the others join it.
func (d *decision) chooseGeneration() {
	var newest int64
	for _, s := range d.Stored.Slices {
		if s.Spec.Pool.Name == d.Node {
			newest = max(newest, s.Spec.Pool.Generation)
		}
	}
	otherCount := slices.ContainsFunc(d.Stored.Slices, func(s *resourceapi.ResourceSlice) bool {
		return s.Spec.Pool.Name == d.Node && s.Spec.Pool.Generation == newest && s.Spec.Pool.ResourceSliceCount != int64(len(d.slots))
	})
	p := d.compare(newest)
	d.generation = max(newest, 1)
	switch {
	case newest == 0:
	// Slices of other names stay until the first one takes their place.
	case otherCount, p.missing == len(d.slots), p.present == len(d.slots) && p.counters && p.changed > 1, p.hasCounters && p.lacksDevices && !p.lacksCounters && !d.anyOlderThan(newest):
		d.generation = newest + 1
	}
}

// comparison is how the slices of a pool differ.
type comparison struct {
	// present are of the newest generation, missing are not there, and changed have other content or are not there.
	present, missing, changed int
	// counters differ.
	counters                                 bool
	hasCounters, lacksCounters, lacksDevices bool
}

func (d *decision) compare(newest int64) (p comparison) {
	for i := range d.slots {
		s := &d.slots[i]
		isCounters := len(s.want.Spec.SharedCounters) > 0
		p.hasCounters = p.hasCounters || isCounters
		switch {
		case s.have == nil:
			p.lacksCounters, p.lacksDevices = p.lacksCounters || isCounters, p.lacksDevices || !isCounters
			p.missing++
			p.changed++
			continue
		case s.have.Spec.Pool.Generation == newest:
			p.present++
		}
		sameCounters := apiequality.Semantic.DeepEqual(s.have.Spec.SharedCounters, s.want.Spec.SharedCounters)
		p.counters = p.counters || !sameCounters
		if !sameCounters || !sameDevices(s.have.Spec.Devices, s.target) {
			p.changed++
		}
	}
	return p
}

// anyOlderThan reports whether a slice has to join a generation.
func (d *decision) anyOlderThan(generation int64) bool {
	return slices.ContainsFunc(d.slots, func(s slot) bool { return s.have != nil && s.have.Spec.Pool.Generation < generation })
}

// sameDevices compares everything of devices but their taints.
func sameDevices(a, b []resourceapi.Device) bool {
	return slices.EqualFunc(a, b, func(x, y resourceapi.Device) bool {
		x.Taints, y.Taints = nil, nil
		return apiequality.Semantic.DeepEqual(x, y)
	})
}
