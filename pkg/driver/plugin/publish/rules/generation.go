// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import apiequality "k8s.io/apimachinery/pkg/api/equality"

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
	newest, otherCount := d.newest()
	// Slices that are there, those of them that join the newest generation, and those that are not as they should be.
	var present, older, changed int
	var counters, lacksCounters, lacksDevices bool
	for i := range d.slots {
		s := &d.slots[i]
		if s.have == nil {
			if len(s.want.Spec.SharedCounters) > 0 {
				lacksCounters = true
			} else {
				lacksDevices = true
			}
			continue
		}
		present++
		if s.have.Spec.Pool.Generation < newest {
			older++
		}
		sameCounters := apiequality.Semantic.DeepEqual(s.have.Spec.SharedCounters, s.want.Spec.SharedCounters)
		counters = counters || !sameCounters
		if !sameCounters || !s.same {
			changed++
		}
	}
	complete := present == len(d.slots) && older == 0
	d.generation = max(newest, 1)
	switch {
	case newest == 0:
	// Slices of other names stay until the first one takes their place.
	case otherCount, present == 0, complete && counters && changed > 1, lacksDevices && !lacksCounters && older == 0:
		d.generation = newest + 1
	}
}

// newest is the newest generation that is stored, and whether one of its slices says another number of slices.
func (d *decision) newest() (newest int64, otherCount bool) {
	for _, s := range d.Stored.Slices {
		if s.Spec.Pool.Generation >= newest {
			otherCount = s.Spec.Pool.ResourceSliceCount != int64(len(d.slots)) || otherCount && s.Spec.Pool.Generation == newest
			newest = s.Spec.Pool.Generation
		}
	}
	return newest, otherCount
}
