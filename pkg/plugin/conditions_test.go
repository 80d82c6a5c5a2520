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
	} {
		if got := eventReason(reason); got != want {
			t.Errorf("%s gives %q, want %q", reason, got, want)
		}
	}
}

func TestEventMessageNamesGPU(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]string{
		"it fell off":                    "GPU 0000:1b:00.0: it fell off",
		"GPU 0000:1b:00.0 does not work": "GPU 0000:1b:00.0 does not work",
	} {
		if got := eventMessage(device.Condition{PCIAddress: firstGPU, Message: message}); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
