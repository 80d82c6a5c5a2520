// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
)

// TestKeeping: a GPU that is missing stays as it was, and the others are as they
// are now.
func TestKeeping(t *testing.T) {
	h100, t4 := loadNode(t, "h100-80-sxm"), loadNode(t, "t4").GPUs[0]
	four := replicate(h100, 4) // listed backwards
	earlier := mustInventory(t, four).With(mixedStatus())
	plain := earlier.With(Status{}).ResourceSlices(testOptions)

	// After a reboot of the driver the first GPU is missing, the second is another
	// one, minors moved, and a GPU is new.
	now := &gpu.Node{DriverVersion: "599.1.1", GPUs: slices.Clone(four.GPUs[:3])}
	for n := range now.GPUs {
		now.GPUs[n].Minor = 7 - n
	}
	now.GPUs[2].UUID = "GPU-other"
	t4.PCIAddress = "0000:04:00.0"
	now.GPUs = append(now.GPUs, t4)
	fresh := mustInventory(t, now)
	status := Status{Conditions: []Condition{onGPU(firstGPU, Lost)}}

	all, kept := fresh.With(mixedStatus()).Keeping(earlier)
	if diff := cmp.Diff([]string{firstGPU}, kept); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
	// The new GPU's slice, then the first GPU's as it was, then the others.
	got := all.ResourceSlices(testOptions)
	checkAPI(t, got)
	want := fresh.ResourceSlices(testOptions)
	if diff := cmp.Diff(plain[1].Spec.Devices, got[2].Spec.Devices); diff != "" {
		t.Errorf("the GPU that is missing changed (-want +got):\n%s", diff)
	}
	if got, wantSets := got[0].Spec.SharedCounters[1:], plain[0].Spec.SharedCounters; !cmp.Equal(got, wantSets) {
		t.Errorf("counters (-want +got):\n%s", cmp.Diff(wantSets, got))
	}
	for n, m := range map[int]int{1: 1, 2: 3, 3: 4, 4: 5} {
		if diff := cmp.Diff(want[n].Spec.Devices, got[m].Spec.Devices); diff != "" {
			t.Errorf("slice %d changed (-want +got):\n%s", m, diff)
		}
	}
	d, ok := all.Lookup(GPUName(firstGPU))
	if !ok || d.GPU.Minor != 0 {
		t.Errorf("the GPU that is missing: %+v", d)
	}
	if d, ok := all.Lookup(GPUName(secondGPU)); !ok || d.GPU.Minor != 5 || d.GPU.UUID != "GPU-other" {
		t.Errorf("the GPU that is another one: %+v", d)
	}
	lost := 0
	for _, d := range devicesOf(all.With(status).ResourceSlices(testOptions)) {
		lost += len(d.Taints)
	}
	if lost != 28 {
		t.Errorf("%d taints, want one for each of 28 devices", lost)
	}

	// It stays for as long as it is missing, and comes back.
	again, kept := fresh.Keeping(all.With(status))
	if diff := cmp.Diff(got, again.ResourceSlices(testOptions)); diff != "" || !slices.Equal(kept, []string{firstGPU}) {
		t.Errorf("kept %v the second time (-want +got):\n%s", kept, diff)
	}
	back, kept := mustInventory(t, four).Keeping(again)
	if !slices.Equal(kept, []string{t4.PCIAddress}) {
		t.Errorf("kept %v", kept)
	}
	if d, ok := back.Lookup(GPUName(secondGPU)); !ok || d.GPU != &four.GPUs[2] {
		t.Errorf("the GPU that is back: %+v", d)
	}
}

func TestKeepingNothing(t *testing.T) {
	i := mustInventory(t, replicate(loadNode(t, "a30"), 2))
	for name, earlier := range map[string]*Inventory{
		"none": nil, "itself": i, "empty": mustInventory(t, &gpu.Node{}),
	} {
		all, kept := i.Keeping(earlier)
		if diff := cmp.Diff(i.ResourceSlices(testOptions), all.ResourceSlices(testOptions)); diff != "" || len(kept) != 0 {
			t.Errorf("%s: kept %v (-want +got):\n%s", name, kept, diff)
		}
	}
	// All GPUs of a driver that finds none any more.
	all, kept := mustInventory(t, &gpu.Node{}).Keeping(i)
	if len(kept) != 2 || !cmp.Equal(i.ResourceSlices(testOptions), all.ResourceSlices(testOptions)) {
		t.Errorf("kept %v", kept)
	}
	// What could not be published is still told.
	wrong, err := NewInventory(&gpu.Node{GPUs: []gpu.GPU{{PCIAddress: "1b:00.0"}}}, Terms{})
	if err != nil {
		t.Fatal(err)
	}
	if all, _ := wrong.Keeping(i); len(all.Problems()) != 1 || len(all.With(Status{}).Problems()) != 1 {
		t.Errorf("problems %v", fmt.Sprint(all.Problems()))
	}
}
