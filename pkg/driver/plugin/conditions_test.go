// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/gpu"
)

// speaker says conditions of GPUs that are there to the node and to the users of devices.
type speaker struct {
	notifier *events.Notifier
	claims   Claims
}

func newSpeaker(told *fakeEvents, claims Claims) *speaker {
	return &speaker{notifier: events.NewNotifier(told.Tell), claims: claims}
}

// surveyed is what is known of two GPUs when a survey has found a status of them.
func surveyed(status device.Status, live []claim.LiveClaim) *observedState {
	node := testNodeWith(firstGPU, secondGPU)
	inventory, err := device.NewInventory(node, device.Terms{})
	if err != nil {
		panic(err)
	}
	return &observedState{policy: noPolicy, gpus: &knownGPUs{node: node}, inventory: inventory, enough: true, survey: status, live: live}
}

func (s *speaker) say(ctx context.Context, status device.Status) {
	live, _ := s.claims.Live()
	w := want(surveyed(status, live))
	s.notifier.Set(ctx, "node", w.events, w.over)
}

func TestConditionsAreReportedOnce(t *testing.T) {
	t.Parallel()
	at := func(start int) *gpu.Placement { return &gpu.Placement{Start: start, Size: 1} }
	one := device.Condition{PCIAddress: firstGPU, Reason: device.Occupied, Where: at(0), Message: "one"}
	other := device.Condition{PCIAddress: firstGPU, Reason: device.Occupied, Where: at(1), Message: "other"}
	reworded := one
	reworded.Where, reworded.Message = at(0), "one, in other words"
	everywhere := device.Condition{PCIAddress: firstGPU, Reason: device.Occupied, Message: "all of it"}
	const over = "GPURecovered: no instance of others is in the way any more. Devices are offered again as soon as no taint keeps pods away."

	told := &fakeEvents{}
	r := newSpeaker(told, &fakeClaims{})
	for i, step := range []struct {
		now  []device.Condition
		want []string
	}{
		{now: []device.Condition{one}, want: []string{"GPUOccupied: one."}},
		{now: []device.Condition{reworded, other}, want: []string{"GPUOccupied: other."}},
		{now: []device.Condition{other, reworded}},
		// It is over when nothing is left of it.
		{now: []device.Condition{other}},
		{now: []device.Condition{everywhere}, want: []string{"GPUOccupied: all of it."}},
		{want: []string{over}},
		{now: []device.Condition{reworded}, want: []string{"GPUOccupied: one, in other words."}},
	} {
		before := len(told.list())
		r.say(t.Context(), device.Status{Conditions: step.now})
		var want []string
		for _, event := range step.want {
			want = append(want, strings.Replace(event, ": ", ": GPU "+firstGPU+": ", 1))
		}
		if diff := cmp.Diff(want, told.list()[before:], cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("step %d: events (-want +got):\n%s", i, diff)
		}
	}
}

// TestWiderConditionCounts: of two conditions with one cause and place the one that concerns more devices holds, in any order.
func TestWiderConditionCounts(t *testing.T) {
	t.Parallel()
	narrow := device.Condition{PCIAddress: firstGPU, Reason: device.ReleasePending, Undivided: true, Message: "a record cannot be read"}
	wide := device.Condition{PCIAddress: firstGPU, Reason: device.ReleasePending, Message: "a claim has all of it"}
	for _, both := range [][]device.Condition{{narrow, wide}, {wide, narrow}} {
		if diff := cmp.Diff([]device.Condition{wide}, join(&noPolicy.Health, both)); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}

func TestEventReason(t *testing.T) {
	t.Parallel()
	for reason, want := range map[device.Reason]string{
		device.Lost: "GPULost", device.ResetRequired: "GPUResetRequired", device.Occupied: "GPUOccupied",
		device.ReleasePending: "GPUReleasePending", device.Unresponsive: "GPUUnresponsive",
		device.MPSUnavailable: "MPSUnavailable", device.MPSUnhealthy: "MPSUnhealthy",
		device.XID: "GPUXID", device.UncorrectedECC: "GPUUncorrectedECC", device.RowRemapPending: "GPURowRemapPending",
	} {
		if got := eventReason(reason); got != want {
			t.Errorf("%s gives %q, want %q", reason, got, want)
		}
	}
}

// TestConditionEvents: each GPU is named once, and what is the same of several is one event.
func TestConditionEvents(t *testing.T) {
	t.Parallel()
	place := func(start int) *gpu.Placement { return &gpu.Placement{Start: start, Size: 1} }
	lost := "GPU " + firstGPU + ": read the partitions of GPU " + firstGPU + ": nvmlDeviceGetMigMode on GPU " + firstGPU + ": GPU is lost (NVML code 15)"
	const (
		none    = "the MPS supervisor does not answer"
		unknown = "NVIDIA driver is not loaded"
	)
	told := &fakeEvents{}
	newSpeaker(told, &fakeClaims{}).say(t.Context(), device.Status{Conditions: []device.Condition{
		{PCIAddress: firstGPU, Reason: device.Lost, Message: lost},
		{PCIAddress: firstGPU, Reason: device.MPSUnavailable, Kind: device.MPS, Message: none},
		{PCIAddress: secondGPU, Reason: device.ResetRequired, Message: "GPU " + secondGPU + " does not work"},
		{PCIAddress: secondGPU, Reason: device.MPSUnavailable, Kind: device.MPS, Message: none},
		{PCIAddress: secondGPU, Reason: device.Occupied, Where: place(0), Message: "GPU instance 1 of GPU " + secondGPU + " has no record"},
		{PCIAddress: secondGPU, Reason: device.Occupied, Where: place(1), Message: "GPU instance 2 of GPU " + secondGPU + " has no record"},
		{PCIAddress: secondGPU, Reason: device.Lost, Message: strings.ReplaceAll(lost, firstGPU, secondGPU)},
		{PCIAddress: firstGPU, Reason: device.Unresponsive, Message: unknown},
		{PCIAddress: secondGPU, Reason: device.Unresponsive, Message: unknown},
	}})
	const restart = "Pods that use it do not work any more. Drain the node and restart it; if it is lost again, the GPU or its slot may be broken."
	want := []string{
		"GPULost: GPUs 0000:1b:00.0, 0000:2c:00.0: read the partitions: nvmlDeviceGetMigMode: GPU is lost (NVML code 15). " + restart,
		"MPSUnavailable: GPUs 0000:1b:00.0, 0000:2c:00.0: " + none + ". No MPS shares are allocated until the MPS supervisor of this node runs: look at its pod.",
		"GPUResetRequired: GPU 0000:2c:00.0: does not work. Delete the pods that use it, then reset it (nvidia-smi --gpu-reset) or restart the node.",
		"GPUOccupied: GPU 0000:2c:00.0: GPU instance 1 has no record.",
		"GPUOccupied: GPU 0000:2c:00.0: GPU instance 2 has no record.",
		"GPUUnresponsive: GPUs 0000:1b:00.0, 0000:2c:00.0: " + unknown + ". If this lasts, see whether the NVIDIA driver is loaded and " +
			"whether the kernel log has XID errors, then reset the GPU or restart the node.",
	}
	if diff := cmp.Diff(want, told.list()); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestRecoveryIsTold: once for what concerns the node, and not while something else is
// wrong.
func TestRecoveryIsTold(t *testing.T) {
	t.Parallel()
	on := func(reason device.Reason, addresses ...string) []device.Condition {
		var all []device.Condition
		for _, address := range addresses {
			all = append(all, device.Condition{PCIAddress: address, Reason: reason, Message: "GPU " + address + ": it"})
		}
		return all
	}
	told, claims := &fakeEvents{}, &fakeClaims{}
	claims.live = []claim.LiveClaim{uses(claim.Ref{Namespace: "team", Name: "one", UID: "uid-1"}, "A", firstGPU, nil)}
	r := newSpeaker(told, claims)
	var got []string
	for _, now := range [][]device.Condition{
		on(device.Lost, firstGPU, secondGPU),
		on(device.Unresponsive, firstGPU, secondGPU), // the driver is unloaded to mend it
		nil,
		on(device.Lost, firstGPU, secondGPU),
		on(device.Lost, secondGPU),
		nil,
		on(device.Withdrawn, firstGPU),
		nil,
	} {
		r.say(t.Context(), device.Status{Conditions: now})
		for _, event := range told.list() {
			if strings.Contains(event, "Recovered") {
				got = append(got, event)
			}
		}
		told.all = nil
		got = append(got, "--")
	}
	want := []string{
		"--", "--",
		"GPURecovered: GPUs 0000:1b:00.0, 0000:2c:00.0: the GPU answers again. Devices are offered again as soon as no taint keeps pods away.",
		"one: GPURecovered: Device A: the GPU answers again. Processes that have failed must be restarted.",
		"--", "--",
		"GPURecovered: GPU 0000:1b:00.0: the GPU is back. Devices are offered again as soon as no taint keeps pods away.",
		"one: GPURecovered: Device A: the GPU is back. Processes that have failed must be restarted.",
		"--",
		"GPURecovered: GPU 0000:2c:00.0: the GPU is back. Devices are offered again as soon as no taint keeps pods away.",
		"--", "--",
		"GPURecovered: GPU 0000:1b:00.0: no longer withdrawn. Devices are offered again as soon as no taint keeps pods away.",
		"--",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestLastingConditionsAreRepeated: before the API server forgets the event, and not more
// often; nor are they once they are over.
func TestLastingConditionsAreRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		told, claims := &fakeEvents{}, &fakeClaims{}
		claims.live = []claim.LiveClaim{uses(claim.Ref{Namespace: "team", Name: "one", UID: "uid-1"}, "gpu-0000-1b-00-0", firstGPU, nil)}
		r := newSpeaker(told, claims)
		status := device.Status{
			Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Lost, Message: "it fell off"}},
			Static:     []device.Static{{PCIAddress: secondGPU, UUID: "MIG-1"}},
		}
		times := map[string][]time.Duration{}
		start, seen := time.Now(), 0
		poll := func(d time.Duration) {
			for end := time.Since(start) + d; time.Since(start) < end; time.Sleep(10 * time.Second) {
				r.say(t.Context(), status)
				synctest.Wait()
				all := told.list()
				for _, e := range all[seen:] {
					times[e] = append(times[e], time.Since(start))
				}
				seen = len(all)
			}
		}
		poll(5 * time.Hour)
		status = device.Status{Static: status.Static}
		poll(5 * time.Hour)
		lost, repeated := 0, 5
		for event, times := range times {
			switch {
			case !strings.Contains(event, "GPULost"):
				if len(times) != 1 {
					t.Errorf("%s: %v, want it once", event, times)
				}
				continue
			case len(times) <= repeated || len(times) > 2*repeated:
				t.Errorf("%s: %v", event, times)
			}
			lost++
			for i, at := range append(times[1:], 5*time.Hour) {
				if since := at - times[i]; since >= time.Hour-time.Minute {
					t.Errorf("%s: %v after the last time", event, since)
				}
			}
		}
		if lost != 2 || len(times) != 5 {
			t.Errorf("want the loss and the recovery for the node and for the claim, and the partition: %v", times)
		}
	})
}

// TestUsersOfDevices: those are told whose device it is, when something is wrong with it
// and when that is over.
func TestUsersOfDevices(t *testing.T) {
	t.Parallel()
	at := func(start int) *gpu.Placement { return &gpu.Placement{Start: start, Size: 1} }
	held := func(name, device, address string, where *gpu.Placement) claim.LiveClaim {
		return uses(claim.Ref{Namespace: "team", Name: name, UID: types.UID(name)}, device, address, where)
	}
	told, claims := &fakeEvents{}, &fakeClaims{}
	r := newSpeaker(told, claims)
	lost := func(address string) device.Condition {
		return device.Condition{PCIAddress: address, Reason: device.Lost, Message: "GPU " + address + ": it fell off"}
	}
	const lostText = "the GPU is lost (it fell off). Processes that use it fail. To go on, " + anotherDevice + "."
	const wellText = "the GPU is back. Processes that have failed must be restarted."
	const mpsText = "MPS accepts no new processes (a fault). " +
		"Containers that start again fail until the processes that run have ended. If this lasts, delete the pod."
	whole, first, second := held("whole", "A", firstGPU, nil), held("one", "B-0", secondGPU, at(0)), held("two", "B-1", secondGPU, at(1))
	both := held("whole", "B-1", secondGPU, at(1))
	unavailable := device.Condition{PCIAddress: secondGPU, Kind: device.MPS, Reason: device.MPSUnavailable, Message: "none"}
	shared := held("shared", "B-mps", secondGPU, nil)
	shared.Devices[0].Session = &claim.LiveSession{}
	const supervisorText = "the MPS supervisor of the node does not answer (none). " +
		"MPS servers end with it, and containers that use MPS cannot start until it is back."
	observer := held("look", "A-observer", firstGPU, nil)
	observer.Devices[0].Admin = true
	mps := device.Condition{PCIAddress: secondGPU, Reason: device.MPSUnhealthy, Where: at(1), Message: "a fault"}
	for i, step := range []struct {
		now  []device.Condition
		held []claim.LiveClaim
		want []string
	}{
		{held: []claim.LiveClaim{whole, first, second, observer}},
		{now: []device.Condition{lost(firstGPU)}, want: []string{"whole: GPULost: Device A: " + lostText}},
		{now: []device.Condition{lost(firstGPU), mps}, want: []string{"two: MPSUnhealthy: Device B-1: " + mpsText}},
		{now: []device.Condition{lost(firstGPU), lost(secondGPU)}, held: []claim.LiveClaim{whole, first, both}, want: []string{
			"one: GPULost: Device B-0: " + lostText, "whole: GPULost: Device B-1: " + lostText,
		}},
		// Not of those whose claims have been released.
		{now: []device.Condition{lost(secondGPU)}, held: []claim.LiveClaim{whole, both}, want: []string{"whole: GPURecovered: Device A: " + wellText}},
		{want: []string{"whole: GPURecovered: Device B-1: " + wellText}},
		{now: []device.Condition{{PCIAddress: firstGPU, Reason: device.Occupied, Message: "one"}, unavailable}},
		{now: []device.Condition{unavailable}, held: []claim.LiveClaim{first, shared}, want: []string{"shared: MPSUnavailable: Device B-mps: " + supervisorText}},
	} {
		if step.held != nil {
			claims.live = step.held
		}
		before := len(told.list())
		r.say(t.Context(), device.Status{Conditions: step.now})
		var got []string
		for _, event := range told.list()[before:] {
			if !strings.Contains(event, ": GPU 0000:") {
				got = append(got, event)
			}
		}
		if diff := cmp.Diff(step.want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("step %d: claimEvents (-want +got):\n%s", i, diff)
		}
	}
}
