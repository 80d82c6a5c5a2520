// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// TestSlices: every kind of node has the slices that the benchmark expects. What NVIDIA's driver
// publishes for a DGX H100 was counted on a simulated machine.
func TestSlices(t *testing.T) {
	dir := t.TempDir()
	if err := run(dir); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]struct{ slices, devices int }{
		"dgx-h100": {slices: 9}, "dgx-a100": {slices: 9}, "l4": {slices: 9},
		"reference": {slices: 9, devices: 8 * 26}, "toy": {slices: 1, devices: 10},
	} {
		data, err := os.ReadFile(filepath.Join(dir, name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		var published []resourceapi.ResourceSlice
		if err := json.Unmarshal(data, &published); err != nil {
			t.Fatal(err)
		}
		devices := 0
		for _, s := range published {
			devices += len(s.Spec.Devices)
			if s.Spec.Pool.ResourceSliceCount != int64(want.slices) || *s.Spec.NodeName != node || s.Spec.Driver != driver {
				t.Errorf("%s: slice %s is of the pool %+v, driver %s", name, s.Name, s.Spec.Pool, s.Spec.Driver)
			}
		}
		if len(published) != want.slices || devices == 0 || want.devices != 0 && devices != want.devices {
			t.Errorf("%s has %d slices with %d devices, want %d with %d", name, len(published), devices, want.slices, want.devices)
		}
	}
}
