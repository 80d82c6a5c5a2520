// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
)

// TestGPUWithoutUUID: what is left of a GPU that is at another address now has no UUID, and most of its
// devices have no address either. They are of one GPU all the same.
func TestGPUWithoutUUID(t *testing.T) {
	const driver, node = "gpu.nvidia.com", "n1"
	names := boards.Names()
	if len(names) < 13 {
		t.Fatalf("only %d boards", len(names))
	}
	for _, name := range names {
		facts, err := boards.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		here, left := facts.GPUs[0], facts.GPUs[0]
		left.PCIAddress, left.UUID = "0000:99:00.0", ""
		facts.GPUs = []gpu.GPU{here, left}
		inventory, err := device.NewInventory(facts, device.Terms{})
		if err != nil {
			t.Fatal(err)
		}
		snapshot := &Snapshot{}
		published := inventory.ResourceSlices(device.Options{
			Driver: driver, Pool: node, NodeName: node, PartitionableDevices: true, ConsumableCapacity: true,
		})
		for i := range published {
			snapshot.Slices = append(snapshot.Slices, &published[i])
		}
		devices := 0
		gpus := New(snapshot, driver).Nodes[0].GPUs
		for _, g := range gpus {
			for _, d := range g.Devices {
				devices++
				if want := device.AddressIn(d.Name); g.PCIBusID != want {
					t.Errorf("%s: %s is of the GPU %q", name, d.Name, g.PCIBusID)
				}
			}
		}
		if len(gpus) != 2 || devices != countDevices(published) {
			t.Errorf("%s: %d GPUs with %d devices", name, len(gpus), devices)
		}
	}
}

func countDevices(published []resourceapi.ResourceSlice) int {
	n := 0
	for i := range published {
		n += len(published[i].Spec.Devices)
	}
	return n
}
