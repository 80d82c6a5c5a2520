// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device_test

import (
	"fmt"
	"maps"
	"slices"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// A small GPU with two memory slices, two decoders and one OFA engine: either
// whole, or 2g, or two 1g of which one may have the OFA engine, or shared.
func Example() {
	engines := func(decoders, ofa int) gpu.Resources {
		return gpu.Resources{MemoryBytes: 8 << 30, Decoders: decoders, OFAEngines: ofa}
	}
	halves := []gpu.Placement{{Start: 0, Size: 1}, {Start: 1, Size: 1}}
	node := &gpu.Node{DriverVersion: "580.95.05", GPUs: []gpu.GPU{{
		PCIAddress: "0000:1b:00.0", ComputeCapability: gpu.Version{Major: 9}, Resources: engines(2, 1),
		MIG: &gpu.MIG{Dynamic: true, MemorySlices: 2, Profiles: []gpu.Profile{
			{ID: 5, Name: "2g.16gb", Slices: 2, MaxInstances: 1, Resources: engines(2, 1), Placements: []gpu.Placement{{Start: 0, Size: 2}}},
			{ID: 19, Name: "1g.8gb", Slices: 1, MaxInstances: 2, Resources: engines(1, 0), Placements: halves},
			{ID: 20, Name: "1g.8gb+me", Slices: 1, MaxInstances: 1, Resources: engines(1, 1), Placements: halves},
		}},
	}}}
	offer := policy.Builtin()
	offer.Default.Partition.Variants = true
	inventory, err := device.NewInventory(node, device.Terms{Policy: offer})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, slice := range inventory.ResourceSlices(device.Options{
		Driver: "gpu.nvidia.com", Pool: "node-1", NodeName: "node-1", PartitionableDevices: true, ConsumableCapacity: true,
	}) {
		fmt.Println(slice.Name)
		for _, set := range slice.Spec.SharedCounters {
			fmt.Println("  counters", set.Name, slices.Sorted(maps.Keys(set.Counters)))
		}
		for _, d := range slice.Spec.Devices {
			var counters []string
			for _, c := range d.ConsumesCounters {
				counters = slices.Sorted(maps.Keys(c.Counters))
			}
			fmt.Println(" ", d.Name, counters)
		}
	}
	// Output:
	// node-1-gpu.nvidia.com-000
	//   counters gpu-0000-1b-00-0 [memory memory-slice-0 memory-slice-1 ofa-engines]
	// node-1-gpu.nvidia.com-001
	//   gpu-0000-1b-00-0-mig-1g8gb-0 [memory memory-slice-0]
	//   gpu-0000-1b-00-0-mig-1g8gb-1 [memory memory-slice-1]
	//   gpu-0000-1b-00-0-mig-1g8gb-me-0 [memory memory-slice-0 ofa-engines]
	//   gpu-0000-1b-00-0-mig-1g8gb-me-1 [memory memory-slice-1 ofa-engines]
	//   gpu-0000-1b-00-0-mig-2g16gb-0 [memory memory-slice-0 memory-slice-1 ofa-engines]
	//   gpu-0000-1b-00-0 [memory]
	//   gpu-0000-1b-00-0-mps [memory]
	//   gpu-0000-1b-00-0-timeslice [memory]
	//   gpu-0000-1b-00-0-observer []
}
