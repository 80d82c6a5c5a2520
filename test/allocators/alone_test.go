// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocators

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// TestSharesAlone: shares of one kind that are all a GPU is published as need no
// counters. Such a pool is allocated correctly by all versions.
func TestSharesAlone(t *testing.T) {
	for model, published := range goldenSlices(t) {
		for _, slice := range published {
			for _, d := range slice.Spec.Devices {
				if !shared(d) || d.Attributes["profile"].StringValue != nil && *d.Attributes["profile"].StringValue != "" {
					continue
				}
				d.ConsumesCounters = nil
				only := *slice.DeepCopy()
				only.Spec.Devices = []resourceapi.Device{d}
				only.Spec.Pool.ResourceSliceCount = 1
				s := newScheduler([]resourceapi.ResourceSlice{only}, d.Name)
				if got, err := s.allocate(request(kind(d)), request(kind(d))); err != nil || len(got) != 2 {
					t.Errorf("%s: two shares of %s: %v, %v", model, d.Name, got, err)
				}
				s.hold(d)
				if got, err := s.allocate(request(kind(d))); err != nil || len(got) > 0 {
					t.Errorf("%s: a share of %s with nothing left: %v, %v", model, d.Name, got, err)
				}
			}
		}
	}
}
