// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestConditionsOf: what holds for a device that a claim has.
func TestConditionsOf(t *testing.T) {
	inventory := mustInventory(t, replicate(loadNode(t, "h100-80-sxm"), 3)).With(Status{
		Static: []Static{static(secondGPU, profile1g, at(4, 1), "MIG-a")},
		Conditions: []Condition{
			onGPU(firstGPU, Unresponsive),
			inPlace(secondGPU, at(0, 4), MPSUnhealthy),
			{PCIAddress: secondGPU, Kind: MPS, Reason: MPSUnavailable},
			{PCIAddress: secondGPU, Undivided: true, Reason: FabricUnhealthy},
			// It uses up the only engines of the kind, which taints others that need them.
			ofProfile(inPlace(thirdGPU, at(6, 1), Occupied), profile1gMe),
		},
	})
	whole := func(address string) string { return GPUName(address) }
	for name, want := range map[string][]Reason{
		whole(firstGPU):                           {Unresponsive},
		whole(firstGPU) + "-mig-1g10gb-0":         {Unresponsive},
		whole(firstGPU) + "-observer":             {Unresponsive},
		whole(secondGPU):                          {FabricUnhealthy, MPSUnhealthy},
		whole(secondGPU) + "-mps":                 {FabricUnhealthy, MPSUnavailable, MPSUnhealthy},
		whole(secondGPU) + "-mig-1g10gb-2":        {MPSUnhealthy},
		whole(secondGPU) + "-mig-1g10gb-4":        nil,
		whole(secondGPU) + "-mig-1g10gb-4-static": nil,
		whole(secondGPU) + "-observer":            {FabricUnhealthy},
		whole(thirdGPU) + "-mig-1g10gb-0":         nil,
		whole(thirdGPU) + "-mig-1g10gb-6":         {Occupied},
		"gpu-that-is-not-there":                   nil,
	} {
		var got []Reason
		for _, c := range inventory.ConditionsOf(name, false) {
			got = append(got, c.Reason)
		}
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("conditions of %s (-want +got):\n%s", name, diff)
		}
	}
	// A claim with an MPS session of its own, on the GPU, and on a partition beside one that has trouble.
	for name, want := range map[string]int{whole(secondGPU): 3, whole(secondGPU) + "-mps": 3, whole(secondGPU) + "-mig-1g10gb-4": 1, whole(thirdGPU): 1} {
		if got := inventory.ConditionsOf(name, true); len(got) != want {
			t.Errorf("conditions of %s with MPS: %+v, want %d", name, got, want)
		}
	}
}

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
