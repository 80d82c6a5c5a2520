// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

func TestNotices(t *testing.T) {
	t.Parallel()
	at := func(start int) *gpu.Placement { return &gpu.Placement{Start: start, Size: 1} }
	one := device.Condition{PCIAddress: firstGPU, Reason: device.Occupied, Where: at(0), Message: "one"}
	other := device.Condition{PCIAddress: firstGPU, Reason: device.Occupied, Where: at(1), Message: "other"}
	reworded := one
	reworded.Where, reworded.Message = at(0), "one, said differently"
	everywhere := device.Condition{PCIAddress: firstGPU, Reason: device.Occupied, Message: "all of it"}

	var n notices
	for i, step := range []struct {
		now              []device.Condition
		appeared, ceased []device.Condition
	}{
		{now: []device.Condition{one}, appeared: []device.Condition{one}},
		{now: []device.Condition{reworded, other}, appeared: []device.Condition{other}},
		{now: []device.Condition{other, reworded}},
		{now: []device.Condition{everywhere}, appeared: []device.Condition{everywhere}, ceased: []device.Condition{other, reworded}},
		{ceased: []device.Condition{everywhere}},
	} {
		appeared, ceased := n.changes(step.now)
		if diff := cmp.Diff(step.appeared, appeared); diff != "" {
			t.Errorf("step %d: appeared (-want +got):\n%s", i, diff)
		}
		if diff := cmp.Diff(step.ceased, ceased); diff != "" {
			t.Errorf("step %d: ceased (-want +got):\n%s", i, diff)
		}
	}
}

func TestEventReason(t *testing.T) {
	t.Parallel()
	for reason, want := range map[device.Reason]string{
		device.Lost: "GPULost", device.ResetRequired: "GPUResetRequired", device.Occupied: "GPUOccupied",
		device.ReleasePending: "GPUReleasePending", device.Unresponsive: "GPUUnresponsive",
		device.MPSUnavailable: "MPSUnavailable", device.MPSUnhealthy: "MPSUnhealthy",
	} {
		if got := eventReason(reason); got != want {
			t.Errorf("%s gives %q, want %q", reason, got, want)
		}
	}
}

// TestConditionEvents: each GPU is named, and what is the same on several is told
// once.
func TestConditionEvents(t *testing.T) {
	t.Parallel()
	place := func(start int) *gpu.Placement { return &gpu.Placement{Start: start, Size: 1} }
	none := "the MPS supervisor does not answer"
	var got []string
	for _, e := range eventsOf([]device.Condition{
		{PCIAddress: firstGPU, Reason: device.Lost, Message: "it fell off"},
		{PCIAddress: firstGPU, Reason: device.MPSUnavailable, Kind: device.MPS, Message: none},
		{PCIAddress: secondGPU, Reason: device.ResetRequired, Message: "GPU " + secondGPU + " does not work"},
		{PCIAddress: secondGPU, Reason: device.MPSUnavailable, Kind: device.MPS, Message: none},
		{PCIAddress: secondGPU, Reason: device.Occupied, Where: place(0), Message: "partition MIG-1"},
		{PCIAddress: secondGPU, Reason: device.Occupied, Where: place(1), Message: "partition MIG-2"},
	}) {
		got = append(got, eventReason(e.reason)+": "+e.text())
	}
	want := []string{
		"GPULost: GPU 0000:1b:00.0: it fell off",
		"MPSUnavailable: GPUs 0000:1b:00.0, 0000:2c:00.0: " + none,
		"GPUResetRequired: GPU 0000:2c:00.0 does not work",
		"GPUOccupied: GPU 0000:2c:00.0: partition MIG-1",
		"GPUOccupied: GPU 0000:2c:00.0: partition MIG-2",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}
