// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"testing"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/sliceset/template"
	"github.com/partage-dev/partage/test/scale/slices/reference"
)

// TestMeasure: the memory grows with the nodes, and what Partage publishes for 8 H100 takes at most
// 0.8 times as much as what NVIDIA's driver does.
func TestMeasure(t *testing.T) {
	facts, err := template.Machine{Model: "h100", Count: 8}.Facts()
	if err != nil {
		t.Fatal(err)
	}
	inventory, err := device.NewInventory(facts, device.Terms{})
	if err != nil {
		t.Fatal(err)
	}
	pool := reference.Pool{Driver: "gpu.nvidia.com", Node: "node"}
	own := inventory.ResourceSlices(device.Options{
		Driver: pool.Driver, Pool: pool.Node, NodeName: pool.Node, PartitionableDevices: true, ConsumableCapacity: true,
	})
	few, err := Measure(t.Context(), own, 10)
	if err != nil {
		t.Fatal(err)
	}
	many, err := Measure(t.Context(), own, 30)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := Measure(t.Context(), pool.ResourceSlices(facts), 30)
	if err != nil {
		t.Fatal(err)
	}
	if growth := float64(many.Heap) / float64(few.Heap); growth < 2.5 || growth > 3.5 {
		t.Errorf("three times as many nodes take %.1f times as much memory", growth)
	}
	// A node's slices are 0.9 MB.
	if node := many.Heap / 30; node < 500_000 || node > 1_500_000 {
		t.Errorf("a node takes %d bytes", node)
	}
	if part := float64(many.Heap) / float64(theirs.Heap); part > 0.85 {
		t.Errorf("%.2f times as much memory as with NVIDIA's driver", part)
	}
}
