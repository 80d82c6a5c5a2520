// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// published counts what the API server holds.
func published(slices []resourceapi.ResourceSlice) (devices, counterSets int) {
	for _, slice := range slices {
		devices += len(slice.Spec.Devices)
		counterSets += len(slice.Spec.SharedCounters)
	}
	return devices, counterSets
}

// untilPublished waits for exactly these numbers; a test GPU is one whole GPU
// and three partitions.
func (r *rig) untilPublished(t *testing.T, devices, counterSets int) {
	t.Helper()
	r.until(t, "publication", func(ctx context.Context) error {
		if d, c := published(r.api.Slices()); d != devices || c != counterSets {
			return fmt.Errorf("%d devices and %d counter sets, want %d and %d", d, c, devices, counterSets)
		}
		return r.check(ctx, "readiness")
	})
}

// TestGateTurnedOff: what the slice controller reports reaches the publisher.
func TestGateTurnedOff(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilPublished(t, 4, 1)
	r.api.DropCounters(true)
	r.api.DeleteSlices()
	r.register(t)
	r.untilPublished(t, 1, 0)
}

// TestRegistrationChecks: a kubelet that registers the plugin may have deleted
// slices before there was anybody to see it.
func TestRegistrationChecks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilPublished(t, 4, 1)
	r.api.DeleteSlices()
	r.register(t)
	r.untilPublished(t, 4, 1)
}
