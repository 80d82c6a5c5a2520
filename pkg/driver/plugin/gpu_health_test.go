// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/health"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
)

// fakeMonitor has conditions of GPUs.
type fakeMonitor struct {
	mu         sync.Mutex
	conditions []device.Condition
	uuids      map[string]string
}

func (f *fakeMonitor) Follow(uuids map[string]string, _ policy.Health) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.uuids = uuids
}

func (f *fakeMonitor) Conditions() []device.Condition {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conditions
}

func (*fakeMonitor) Run(context.Context) {}

func (f *fakeMonitor) set(conditions ...device.Condition) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.conditions = conditions
}

// TestHealthIsHandedOn: what is wrong with a GPU is published at once, also while a change of a claim settles.
func TestHealthIsHandedOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBubble(t)
		monitor := &fakeMonitor{}
		b.gpus.health = monitor
		defer b.run()()
		synctest.Wait()
		if b.published() != 1 || b.taints() != 0 {
			t.Fatalf("published %d times, %d taints", b.published(), b.taints())
		}
		if diff := cmp.Diff(map[string]string{firstGPU: "GPU-" + firstGPU}, monitor.uuids); diff != "" {
			t.Errorf("follows (-want +got):\n%s", diff)
		}
		profile := uint32(19)
		monitor.set(device.Condition{
			PCIAddress: firstGPU, Reason: device.XID, Value: "94", Message: "XID 94", Where: &gpu.Placement{Start: 1, Size: 1}, ProfileID: &profile, Exact: true,
		})
		b.claims.setLive()
		synctest.Wait()
		b.gpus.pollNow.Fire()
		synctest.Wait()
		if b.taints() != 1 {
			t.Errorf("%d taints", b.taints())
		}
		monitor.set()
		pass(11 * time.Second)
		if b.taints() != 0 {
			t.Errorf("%d taints", b.taints())
		}
	})
}

// TestEffects are those of the policy where nothing else decides, also of what surveys find.
func TestEffects(t *testing.T) {
	t.Parallel()
	reaction := policy.Builtin().Health
	reaction.Conditions["gpu-lost"] = policy.EffectNoExecute
	got := map[string]policy.Effect{}
	for _, c := range join(&reaction, []device.Condition{
		{PCIAddress: firstGPU, Reason: device.Lost}, {PCIAddress: firstGPU, Reason: device.Occupied},
	}, []device.Condition{
		{PCIAddress: firstGPU, Reason: device.Lost, Message: "again"},
		{PCIAddress: firstGPU, Reason: device.XID, Value: "94", Effect: policy.EffectNone},
		{PCIAddress: firstGPU, Reason: device.XID, Value: "95", Effect: policy.EffectNoExecute},
	}) {
		got[string(c.Reason)+c.Value+c.Message] = c.EffectInForce()
	}
	want := map[string]policy.Effect{
		"gpu-lost": policy.EffectNoExecute, "occupied": policy.EffectNoSchedule, "xid94": policy.EffectNone, "xid95": policy.EffectNoExecute,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("effects (-want +got):\n%s", diff)
	}
}

// TestPolicyNamesConditions: what a policy can name is a reason that people are told something
// of.
func TestPolicyNamesConditions(t *testing.T) {
	t.Parallel()
	for name := range policy.Builtin().Health.Conditions {
		if strings.HasPrefix(device.Reason(name).Over(), "no longer ") {
			t.Errorf("nothing is said of %q", name)
		}
	}
}

// TestTextsByEffect: nobody reads that devices are offered again which always were, or while something else, or a taint that stays for its
// time, keeps pods away; and those who are evicted are told.
func TestTextsByEffect(t *testing.T) {
	t.Parallel()
	told, claims := &fakeEvents{}, &fakeClaims{}
	claims.live = []claim.LiveClaim{
		uses(claim.Ref{Namespace: "team", Name: "hit", UID: "1"}, "A", firstGPU, &gpu.Placement{Start: 0, Size: 1}),
		uses(claim.Ref{Namespace: "team", Name: "spared", UID: "2"}, "B", firstGPU, &gpu.Placement{Start: 0, Size: 2}),
	}
	r := newSpeaker(told, claims)
	for _, now := range [][]device.Condition{
		{{PCIAddress: firstGPU, Reason: device.Throttled, Effect: policy.EffectNone, Message: "its clocks are lowered: HardwareThermalSlowdown"}},
		nil,
		{{PCIAddress: firstGPU, Reason: device.XID, Value: "95", Effect: policy.EffectNoExecute, Message: "XID 95 (a name). Reset it", Where: &gpu.Placement{Start: 0, Size: 1}, Exact: true}},
		nil,
	} {
		r.say(t.Context(), device.Status{Conditions: now})
	}
	const at = ": GPU 0000:1b:00.0: "
	want := []string{
		"GPUThrottled" + at + "its clocks are lowered: HardwareThermalSlowdown. Check the cooling and the power supply of the machine.",
		"hit: GPUThrottled: Device A: the GPU is slower than it could be (its clocks are lowered: HardwareThermalSlowdown).",
		"spared: GPUThrottled: Device B: the GPU is slower than it could be (its clocks are lowered: HardwareThermalSlowdown).",
		"GPURecovered" + at + "the GPU runs at full speed again.",
		"hit: GPURecovered: Device A: the GPU runs at full speed again. Processes that have failed must be restarted.",
		"spared: GPURecovered: Device B: the GPU runs at full speed again. Processes that have failed must be restarted.",
		"GPUXID" + at + "XID 95 (a name). Reset it. Pods that use it are evicted; delete those that ask for nvidia.com/gpu.",
		"hit: GPUXID: Device A: the driver has reported an error of the GPU (XID 95 (a name). Reset it). Pods that use it are evicted; delete those that ask for nvidia.com/gpu.",
		"GPURecovered" + at + "the error is over. Devices are offered again as soon as no taint keeps pods away.",
		"hit: GPURecovered: Device A: the error is over. Processes that have failed must be restarted.",
	}
	if diff := cmp.Diff(want, told.list()); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestReportProgramError(t *testing.T) {
	t.Parallel()
	told, claims := &fakeEvents{}, &fakeClaims{}
	at := func(start int) *gpu.Placement { return &gpu.Placement{Start: start, Size: 1} }
	claims.live = []claim.LiveClaim{
		uses(claim.Ref{Name: "one", UID: "1"}, "A", firstGPU, at(0)),
		uses(claim.Ref{Name: "two", UID: "2"}, "B", firstGPU, at(1)),
		uses(claim.Ref{Name: "other", UID: "3"}, "C", secondGPU, nil),
	}
	p := &Plugin{shared: &shared{options: &Options{Claims: claims, Events: told.Tell}}}
	p.reportProgramError(t.Context(), health.ProgramError{PCIAddress: firstGPU, Place: at(1), Text: "XID 31 (a name). Look for it"})
	p.reportProgramError(t.Context(), health.ProgramError{PCIAddress: secondGPU, Text: "XID 13 (a name)"})
	p.reportHeldBack(t.Context(), health.Hold{PCIAddress: firstGPU, Reason: device.Lost, Earlier: 2, Until: time.Unix(0, 0)})
	want := []string{
		"two: GPUProgramError: Device B: a program on it, of this pod or of one that shares the device, had an error: XID 31 (a name). Look for it. The device is in order.",
		"other: GPUProgramError: Device C: a program on it, of this pod or of one that shares the device, had an error: XID 13 (a name). The device is in order.",
		"GPUHeldBack: GPU 0000:1b:00.0: the GPU is back, but not for the first time (2 before, at most a week ago). It is offered again at 1970-01-01T00:00:00Z if nothing happens until then.",
	}
	if diff := cmp.Diff(want, told.list()); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestTroubles are told only to whom they concern.
func TestTroubles(t *testing.T) {
	t.Parallel()
	states := newDeviceStates(time.Second)
	states.set(nil, []device.Condition{
		{PCIAddress: firstGPU, Reason: device.Lost},
		{PCIAddress: secondGPU, Reason: device.Throttled, Effect: policy.EffectNone},
		{PCIAddress: secondGPU, Reason: device.MPSUnavailable, Kind: device.MPS},
		{PCIAddress: secondGPU, Reason: device.XID, Value: "94", Where: &gpu.Placement{Start: 0, Size: 1}, Exact: true},
	}, time.Now())
	got := states.unusable([]string{"gpu-0000-2c-00-0", "gpu-0000-1b-00-0-mig-1g4gb-0"})
	for _, want := range []string{"device gpu-0000-1b-00-0-mig-1g4gb-0 cannot be used now, the GPU is lost; ", "delete the pod"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
	if got := states.unusable([]string{"gpu-0000-2c-00-0"}); got != "" {
		t.Errorf("of a GPU that works: %s", got)
	}
}

// TestHeldBackTexts: of a fault that is over nobody is told that it lasts.
func TestHeldBackTexts(t *testing.T) {
	t.Parallel()
	c := device.Condition{PCIAddress: firstGPU, Reason: device.Unresponsive, Message: "a call hangs", Over: true}
	expect.Equal(t, usersText(c), "a fault of the GPU is over, and the GPU is held back for a while (a call hangs).")
	expect.Equal(t, adminText(c), "it is over, and the GPU is held back for a while; it was: a call hangs.")
}
