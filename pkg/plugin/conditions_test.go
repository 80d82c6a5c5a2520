// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

func TestConditionsAreReportedOnce(t *testing.T) {
	t.Parallel()
	at := func(start int) *gpu.Placement { return &gpu.Placement{Start: start, Size: 1} }
	one := device.Condition{PCIAddress: firstGPU, Reason: device.Occupied, Where: at(0), Message: "one"}
	other := device.Condition{PCIAddress: firstGPU, Reason: device.Occupied, Where: at(1), Message: "other"}
	reworded := one
	reworded.Where, reworded.Message = at(0), "one, in other words"
	everywhere := device.Condition{PCIAddress: firstGPU, Reason: device.Occupied, Message: "all of it"}

	events := &fakeEvents{}
	r := conditionReporter{events: events}
	for i, step := range []struct {
		now  []device.Condition
		want []string
	}{
		{now: []device.Condition{one}, want: []string{"one"}},
		{now: []device.Condition{reworded, other}, want: []string{"other"}},
		{now: []device.Condition{other, reworded}},
		{now: []device.Condition{everywhere}, want: []string{"all of it"}},
		{},
		{now: []device.Condition{reworded}, want: []string{"one, in other words"}},
	} {
		before := len(events.list())
		r.report(t.Context(), device.Status{Conditions: step.now})
		var want []string
		for _, message := range step.want {
			want = append(want, "GPUOccupied: GPU "+firstGPU+": "+message)
		}
		if diff := cmp.Diff(want, events.list()[before:], cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("step %d: events (-want +got):\n%s", i, diff)
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

// TestConditionEvents: each GPU is named, and a condition of several GPUs is one
// event.
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
