// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/gpu"
)

// taints are those of all published devices but observers, by the device's name. A
// device without any is in the map too.
func taints(slices []resourceapi.ResourceSlice) map[string][]string {
	all := map[string][]string{}
	for _, slice := range slices {
		for _, d := range slice.Spec.Devices {
			if isObserver(d) {
				continue
			}
			all[d.Name] = nil
			for _, taint := range d.Taints {
				all[d.Name] = append(all[d.Name], strings.TrimPrefix(taint.Key, testDriver+"/"))
			}
		}
	}
	return all
}

// devicesOf are the devices of test GPUs with the same taints on each.
func devicesOf(byGPU map[string][]string) map[string][]string {
	all := map[string][]string{}
	for address, taints := range byGPU {
		name := device.GPUName(address)
		for _, d := range []string{name, name + "-mig-1g4gb-0", name + "-mig-1g4gb-1", name + "-mig-2g8gb-0"} {
			all[d] = taints
		}
	}
	return all
}

func (r *rig) untilTainted(t *testing.T, want map[string][]string) {
	t.Helper()
	r.until(t, "publication", func(context.Context) error {
		if diff := cmp.Diff(want, taints(r.api.Slices())); diff != "" {
			return errors.New("taints (-want +got):\n" + diff)
		}
		return nil
	})
}

// TestGPULostAndBack: its devices stay, tainted; the other GPU is not concerned;
// there is one event, and one when it is back.
func TestGPULostAndBack(t *testing.T) {
	t.Parallel()
	for name, without := range map[string]*gpu.Node{
		"broken":  withBroken(testNodeWith(firstGPU), broken(secondGPU, gpu.ErrLost)),
		"missing": testNodeWith(firstGPU),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.hardware.setNode(testNodeWith(firstGPU, secondGPU))
			r.start(t)
			well := devicesOf(map[string][]string{firstGPU: nil, secondGPU: nil})
			r.untilTainted(t, well)
			r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })

			r.hardware.setNode(without)
			r.untilTainted(t, devicesOf(map[string][]string{firstGPU: nil, secondGPU: {"gpu-lost"}}))
			if err := r.check(t.Context(), "readiness"); err != nil {
				t.Errorf("a lost GPU makes the plugin unready: %v", err)
			}
			r.hardware.setNode(testNodeWith(firstGPU, secondGPU))
			r.untilTainted(t, well)
			r.until(t, "events", func(context.Context) error {
				got := r.events.list()
				if len(got) != 2 || !strings.HasPrefix(got[0], "GPULost: GPU "+secondGPU) || !strings.HasPrefix(got[1], "GPURecovered: GPU "+secondGPU) {
					return fmt.Errorf("events: %q", got)
				}
				return nil
			})
		})
	}
}

// TestTaintBeforeEvent: who reads an event without its taint takes it for over.
func TestTaintBeforeEvent(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var order []string
	r.options.Events = func(_ context.Context, all ...events.Event) {
		for i := range all {
			order = append(order, all[i].Reason)
		}
	}
	r.build(t)
	l := r.plugin.gpus
	l.publish = func(w *wanted) { order = append(order, string(w.status.Conditions[0].Reason)) }
	l.gpus.node = testNodeWith(firstGPU)
	l.inventory, l.survey.enough = inventoryOf(t, l.gpus.node), true
	l.survey.Status = device.Status{Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Lost}}}
	l.propagate(t.Context())
	if diff := cmp.Diff([]string{"gpu-lost", "GPULost"}, order); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

// TestDriverGoneWhileRunning: not ready, everything tainted, unpreparing works;
// it comes back by itself.
func TestDriverGoneWhileRunning(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	kubelet := r.register(t)
	r.untilTainted(t, devicesOf(map[string][]string{firstGPU: nil}))
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })

	r.hardware.setError(fmt.Errorf("%w: unloaded", gpu.ErrDriverNotLoaded))
	r.untilTainted(t, devicesOf(map[string][]string{firstGPU: {"unresponsive"}}))
	if err := r.check(t.Context(), "readiness"); err == nil {
		t.Error("ready without a driver")
	}
	if err := r.check(t.Context(), "liveness"); err != nil {
		t.Errorf("not alive without a driver: %v", err)
	}
	claim := r.claim("one")
	answer, err := kubelet.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil || answer.Claims[claim.Uid].GetError() != "" {
		t.Errorf("unprepare without a driver: %v, %v", answer, err)
	}

	r.hardware.setError(nil)
	r.untilTainted(t, devicesOf(map[string][]string{firstGPU: nil}))
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
}

// TestHungDiscovery: while a discovery hangs, conditions are still seen, and the
// plugin is alive and ready.
func TestHungDiscovery(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	r.untilTainted(t, devicesOf(map[string][]string{firstGPU: nil}))
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })

	hangs := make(chan struct{})
	var hung bool
	r.hardware.setOnDiscover(func(ctx context.Context) error {
		if !hung {
			hung = true
			close(hangs)
		}
		<-ctx.Done()
		return ctx.Err()
	})
	<-hangs
	r.claims.setStatus(device.Status{Conditions: []device.Condition{{
		PCIAddress: firstGPU, Reason: device.Unresponsive, Message: "a call has not returned",
	}}})
	r.untilTainted(t, devicesOf(map[string][]string{firstGPU: {"unresponsive"}}))
	for _, service := range []string{"liveness", "readiness"} {
		if err := r.check(t.Context(), service); err != nil {
			t.Errorf("%s: %v", service, err)
		}
	}
}

// TestDiscoveryFromBeforeReturn: a discovery that began before a GPU came back, and ends after a survey has found it, does not say
// once more that it is lost. The next one may.
func TestDiscoveryFromBeforeReturn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	well := testNodeWith(firstGPU, secondGPU)
	r.hardware.setNode(well)
	r.start(t)
	untainted, lostOne := devicesOf(map[string][]string{firstGPU: nil, secondGPU: nil}), devicesOf(map[string][]string{firstGPU: nil, secondGPU: {"gpu-lost"}})
	r.untilTainted(t, untainted)

	began, end, again := make(chan struct{}), make(chan struct{}), make(chan struct{})
	discoveries := 0
	isLost := withBroken(testNodeWith(firstGPU), broken(secondGPU, gpu.ErrLost))
	r.claims.setStatus(lost(secondGPU))
	r.hardware.mu.Lock()
	r.hardware.node = isLost
	r.hardware.onDiscover = func(ctx context.Context) error {
		switch discoveries++; discoveries {
		case 1: // it has read of the node what was so before
			close(began)
			select {
			case <-end:
			case <-ctx.Done():
			}
		case 2:
			close(again)
		}
		return nil
	}
	r.hardware.mu.Unlock()
	r.untilTainted(t, lostOne)
	<-began
	r.hardware.setNode(well)
	r.claims.setStatus(device.Status{})
	r.untilTainted(t, untainted)
	close(end)
	<-again // one begins when the loop has taken the one before
	if got := r.events.list(); len(got) != 2 || !strings.HasPrefix(got[0], "GPULost: ") || !strings.HasPrefix(got[1], "GPURecovered: ") {
		t.Errorf("events: %q", got)
	}

	r.hardware.setNode(isLost)
	r.untilTainted(t, lostOne)
}

// TestSurveyIsPublished: conditions and partitions of others, as they come and
// go, to claims as well as to the cluster.
func TestSurveyIsPublished(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	well := devicesOf(map[string][]string{firstGPU: nil})
	r.untilTainted(t, well)

	name := device.GPUName(firstGPU)
	static := name + "-mig-1g4gb-1-static"
	r.claims.setStatus(device.Status{Static: []device.Static{{
		PCIAddress: firstGPU, ProfileID: 19, Placement: gpu.Placement{Start: 1, Size: 1}, UUID: "MIG-1",
	}}})
	r.untilTainted(t, map[string][]string{
		name: {"occupied"}, name + "-mig-1g4gb-0": nil, name + "-mig-1g4gb-1": {"occupied"}, static: nil,
		name + "-mig-2g8gb-0": {"occupied"},
	})
	r.claims.mu.Lock()
	_, known := r.claims.inventory.Lookup(static)
	r.claims.mu.Unlock()
	if !known {
		t.Error("claims do not know a device that is published")
	}
	r.claims.setStatus(device.Status{})
	r.untilTainted(t, well)
	got := r.events.list()
	if len(got) != 1 || !strings.HasPrefix(got[0], reasonStaticPartitions+": GPU "+firstGPU) || !strings.Contains(got[0], "MIG-1") {
		t.Errorf("events: %q", got)
	}
}

// TestModeChanged: changes that no survey shows are found by discovering again.
func TestModeChanged(t *testing.T) {
	t.Parallel()
	ampere := func(enabled bool) *gpu.Node {
		node := testNodeWith(firstGPU)
		node.GPUs[0].MIG.Dynamic, node.GPUs[0].MIG.Enabled = false, enabled
		return node
	}
	r := newRig(t)
	r.hardware.setNode(ampere(false))
	r.start(t)
	r.untilPublished(t, 1, 1)
	r.hardware.setNode(ampere(true))
	r.untilPublished(t, 3, 1)
	r.hardware.setNode(testNodeWith(firstGPU, secondGPU))
	r.untilPublished(t, 8, 2)
}

// TestFirstPublicationAwaitsSurvey: what is stored may say more of a GPU than is known while it was not observed, so that it
// stays, though not for ever.
func TestFirstPublicationAwaitsSurvey(t *testing.T) {
	t.Parallel()
	s := newStepper(t)
	s.claims.unobserved = []string{firstGPU}
	s.claims.status = device.Status{Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Occupied, Message: "one"}}}
	s.poll(0)
	if s.claims.inventory != s.loop.now.inventory || len(s.loop.now.status.Conditions) != 1 {
		t.Error("claims do not get what the survey has found")
	}
	if s.handedOn() || s.plugin.readiness.notReady() == "" {
		t.Error("published before all GPUs have been observed")
	}
	<-s.loop.pollNow // there is another survey soon
	s.poll(0)
	if s.handedOn() {
		t.Error("published after a second survey that has not observed it either")
	}
	s.loop.survey.awaitedSince = s.loop.survey.awaitedSince.Add(-surveyPatience)
	s.poll(0)
	if !s.handedOn() {
		t.Error("not published for ever")
	}
	if s.loop.survey.again.Stop() {
		t.Error("another survey is asked for although nothing waits for it")
	}
	isUnknown := func(c device.Condition) bool { return c.PCIAddress == firstGPU && c.Reason == device.ReleasePending }
	if !slices.ContainsFunc(s.loop.now.status.Conditions, isUnknown) {
		t.Error("a GPU is published as if it had been observed")
	}
	s.claims.unobserved = nil
	s.poll(0)
	if slices.ContainsFunc(s.loop.now.status.Conditions, isUnknown) {
		t.Error("kept back although it was observed")
	}
}
