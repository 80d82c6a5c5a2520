// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	fatal "github.com/partage-dev/partage/test/must"
)

// How many calls an observation of a GPU takes is what the documentation of MIGState
// says.
func TestSimulatedCostOfObservation(t *testing.T) {
	c, file := simulate(t, newMachine(t, "h100-80-sxmx1"))
	pci := snapshot(t, file).GPUs[0].PCIAddress
	observe := func() {
		t.Helper()
		fatal.Get(c.MIGState(t.Context(), pci))(t)
	}
	wants := func(when string, want uint64) {
		t.Helper()
		observe() // fills the caches
		before := calls(t, file)
		observe()
		var cost uint64
		for call, made := range calls(t, file) {
			cost += made - before[call]
		}
		expect.Equal(t, cost, want, when, "calls")
	}
	wants("mode off", 2)
	fatal.Do(t, c.SetMIGMode(t.Context(), pci, true))
	wants("empty", 9)
	for slice := range 7 {
		gi := fatal.Get(c.CreateInstance(t.Context(), pci, oneSlice, gpu.Placement{Start: slice, Size: 1}))(t)
		fatal.Get(c.CreateComputeInstance(t.Context(), pci, gi))(t)
	}
	wants("full", 37)
}

// An observation of a GPU instance ends early where no slice is left, and misses nothing by that.
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

// TestIDOwners: from when on an id is that of one instance only, of instance 3 after observations one
// second after the other. Each observation has the UUIDs of the instance's compute instances, or is nil
// without the instance.
func TestIDOwners(t *testing.T) {
	start := time.Now()
	for name, test := range map[string]struct {
		observations [][]string
		since        int
	}{
		"found by the first observation":      {[][]string{{"MIG-a"}, {"MIG-a"}}, 0},
		"made after the first observation":    {[][]string{nil, nil, {"MIG-a"}, {"MIG-a"}}, 0},
		"another's before, then free":         {[][]string{{"MIG-a"}, nil, nil, {"MIG-b"}, {"MIG-b"}}, 1},
		"another's at once":                   {[][]string{{"MIG-a"}, {"MIG-a"}, {"MIG-b"}, {"MIG-b"}}, 2},
		"another's, then half made":           {[][]string{{"MIG-a"}, {}, {"MIG-b"}}, 1},
		"half made first":                     {[][]string{nil, {}, {"MIG-a"}}, 0},
		"divided and no longer so":            {[][]string{{"MIG-a", "MIG-b"}, {"MIG-a"}}, 1},
		"two after the other":                 {[][]string{{"MIG-a"}, nil, {"MIG-b"}, nil, {"MIG-c"}}, 3},
		"an observation that was overtaken":   {[][]string{{"MIG-a"}, {"MIG-b"}, {"MIG-a"}, {"MIG-b"}}, 3},
		"the same again after a hole":         {[][]string{{"MIG-a"}, nil, {"MIG-a"}}, 1},
		"found by the only observation there": {[][]string{{"MIG-a"}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			ids := &idOwners{gpus: map[string]map[int]idOwner{}}
			var last gpu.Instance
			for second, uuids := range test.observations {
				over := start.Add(time.Duration(second) * time.Second)
				// Of another GPU, and another id.
				ids.note("other", []gpu.Instance{{ID: 3, Compute: []gpu.ComputeInstance{{UUID: "MIG-" + over.String()}}}}, over)
				instances := []gpu.Instance{{ID: 4, Compute: []gpu.ComputeInstance{{UUID: "MIG-4"}}}}
				if uuids != nil {
					instances = append(instances, gpu.Instance{ID: 3})
				}
				for i, uuid := range uuids {
					instances[1].Compute = append(instances[1].Compute, gpu.ComputeInstance{ID: i, UUID: uuid})
				}
				ids.note("this", instances, over)
				if instances[0].IDSince != start {
					t.Fatalf("instance 4 since %s", instances[0].IDSince.Sub(start))
				}
				last = instances[len(instances)-1]
			}
			if want := start.Add(time.Duration(test.since) * time.Second); last.ID != 3 || last.IDSince != want {
				t.Errorf("instance %d since %s, want %s", last.ID, last.IDSince.Sub(start), want.Sub(start))
			}
		})
	}
}
