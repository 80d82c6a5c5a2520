// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// How many calls a look at a GPU takes is what the documentation of MIGState
// says.
func TestSimulatedCostOfLook(t *testing.T) {
	c, file := simulate(t, newMachine(t, "h100-80-sxmx1"))
	pci := snapshot(t, file).GPUs[0].PCIAddress
	look := func() {
		t.Helper()
		if _, err := c.MIGState(t.Context(), pci); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(when string, want uint64) {
		t.Helper()
		look() // fills the caches
		before := calls(t, file)
		look()
		var cost uint64
		for call, made := range calls(t, file) {
			cost += made - before[call]
		}
		if cost != want {
			t.Errorf("%s: %d calls, want %d", when, cost, want)
		}
	}
	expect("mode off", 2)
	if err := c.SetMIGMode(t.Context(), pci, true); err != nil {
		t.Fatal(err)
	}
	expect("empty", 9)
	for slice := range 7 {
		gi, err := c.CreateInstance(t.Context(), pci, oneSlice, gpu.Placement{Start: slice, Size: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.CreateComputeInstance(t.Context(), pci, gi); err != nil {
			t.Fatal(err)
		}
	}
	expect("full", 37)
}

// A look at a GPU instance ends early where no slice is left, and misses nothing by that.
func TestSimulatedLookAtFullGPU(t *testing.T) {
	const threeSlices, withMedia = 9, 20
	const oneOfThree, twoOfThree = 0, 1
	c, file := simulate(t, newMachine(t, "h100-80-sxmx1"))
	var want gpu.MIGState
	update(t, file, func(m *machine.Machine) {
		mig := m.GPUs[0].MIG
		mig.Current, mig.Pending = true, true
		want = gpu.MIGState{Enabled: true, Pending: true}
		add := func(profile uint32, id, start, size int, compute ...machine.ComputeInstance) {
			at := machine.Placement{Start: start, Size: size}
			mig.Instances = append(mig.Instances, machine.GPUInstance{ID: id, ProfileID: profile, Placement: at, Compute: compute})
			found := gpu.Instance{ID: id, ProfileID: profile, Placement: gpu.Placement(at)}
			for _, ci := range compute {
				found.Compute = append(found.Compute, gpu.ComputeInstance{ID: ci.ID, UUID: ci.UUID, Slices: ci.Placement.Size})
			}
			want.Instances = append(want.Instances, found)
		}
		add(threeSlices, 2, 0, 4,
			machine.ComputeInstance{ID: 0, ProfileID: oneOfThree, Placement: machine.Placement{Start: 0, Size: 1}, UUID: "MIG-a"},
			machine.ComputeInstance{ID: 1, ProfileID: twoOfThree, Placement: machine.Placement{Start: 1, Size: 2}, UUID: "MIG-b"})
		add(withMedia, 11, 4, 1)
		add(oneSlice, 12, 5, 1, machine.ComputeInstance{
			ID: 0, ProfileID: oneOfThree, Placement: machine.Placement{Start: 0, Size: 1}, UUID: "MIG-c",
		})
		add(oneSlice, 13, 6, 1)
	})
	expectState(t, c, snapshot(t, file).GPUs[0].PCIAddress, "full", want)
}
