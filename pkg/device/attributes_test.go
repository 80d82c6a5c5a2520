// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestAttributesOf: they are those that are published, and the caller's.
func TestAttributesOf(t *testing.T) {
	inventory := mustInventory(t, replicate(loadNode(t, "h100-80-sxm"), 1))
	published := map[string]bool{}
	for _, slice := range inventory.ResourceSlices(Options{Driver: "d", Pool: "p", NodeName: "n", PartitionableDevices: true, ConsumableCapacity: true}) {
		for _, d := range slice.Spec.Devices {
			published[d.Name] = true
			got := inventory.AttributesOf(d.Name)
			if diff := cmp.Diff(d.Attributes, got); diff != "" {
				t.Errorf("attributes of %s (-published +got):\n%s", d.Name, diff)
			}
			clear(got)
		}
	}
	if len(published) == 0 || inventory.AttributesOf("gpu-that-is-not-there") != nil {
		t.Errorf("%d devices are published", len(published))
	}
	for name := range published {
		if len(inventory.AttributesOf(name)) == 0 {
			t.Errorf("%s has lost its attributes", name)
		}
	}
}
