// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// lose loses a GPU: all of its devices are tainted twice, and node, claim and pod are told.
func lose(w *world) {
	named(w.pods, "train-0").OwnerReferences = []metav1.OwnerReference{{Kind: "Job", Name: "train", Controller: new(true)}}
	w.taint("gpu-1", "0000-1b-00-0", "gpu-lost", "", resourceapi.DeviceTaintEffectNoExecute)
	w.taint("gpu-1", "0000-1b-00-0", "xid", "79", resourceapi.DeviceTaintEffectNoExecute)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUXID", "GPU 0000:1b:00.0: XID 79 (GPU has fallen off the bus). Pods that use it are evicted; delete those that ask for nvidia.com/gpu.", 30*time.Second)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPULost", "GPU 0000:1b:00.0: the GPU is lost. Pods that use it are evicted; delete those that ask for nvidia.com/gpu. Drain the node and restart it.", 20*time.Second)
	for _, reason := range []string{"GPUXID", "GPULost"} {
		w.ofTenant("ResourceClaim", "train-0-gpu", corev1.EventTypeWarning, reason, "Device gpu: the GPU is lost. Pods that use it are evicted; delete those that ask for nvidia.com/gpu.", 20*time.Second)
		w.ofTenant("Pod", "train-0", corev1.EventTypeWarning, reason, "Device gpu of claim train-0-gpu: the GPU is lost. Pods that use it are evicted; delete those that ask for nvidia.com/gpu.", 20*time.Second)
	}
}

func allFindings(r *Report) (all findings) {
	for _, c := range r.Checks {
		all = append(all, c.Findings...)
	}
	return all
}

// TestOneEntryPerGPU: twenty findings for three GPUs, without times, were one of each taint, node, claim and pod.
func TestOneEntryPerGPU(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	lose(w)
	r := w.examine(t)
	all := allFindings(r)
	if len(all) != 1 || len(r.History) != 0 {
		t.Fatalf("%d findings, want one:\n%s", len(all), text(t, r, printer.Format{}))
	}
	f := all[0]
	if f.Message != "lost, XID 79" || f.Since == nil || now.Sub(f.Since.Time) != 40*time.Second || f.Objects[0].String() != "GPU 0 (1b:00) on gpu-1" {
		t.Errorf("%+v", f)
	}
	if len(f.Pods) != 1 || f.Pods[0].String() != "pod team/train-0" || !slices.Equal(f.Commands, []string{"kubectl delete pod -n team train-0"}) || !strings.Contains(f.Remedy, "restart it") {
		t.Errorf("%+v", f)
	}
	if strings.Contains(f.Said, "evicted") || !strings.Contains(f.Said, "the GPU is lost") {
		t.Errorf("it is said that %q", f.Said)
	}
	compare(t, "lost.txt", text(t, r, printer.Format{}))
}

// TestUnevicted: pods with extended resources stay on a GPU that is lost (kubernetes#141290), and it was said that they are evicted.
func TestUnevicted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	lose(w)
	w.claims[0].Annotations = map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
	if all := allFindings(w.examine(t)); len(all) != 1 || !strings.Contains(all[0].Message, "kubernetes#141290") {
		t.Errorf("%+v", all)
	}
}

// observe has a pod look at a GPU of gpu-1.
func (w *world) observe(name, device string) {
	w.more(name)
	c := named(w.claims, name+"-gpu")
	c.Status.Allocation.Devices.Results[0].Device, c.Status.Allocation.Devices.Results[0].AdminAccess = device, new(true)
}

// TestObservers: where a GPU does nothing any more, those that only look at it are affected, too; to delete them does not help.
func TestObservers(t *testing.T) {
	t.Parallel()
	const both = "pod team/train-0, team/agent"
	for taint, want := range map[string]string{
		"gpu-lost": both, "reset-required": both, "unresponsive": both,
		"recovery-required": "pod team/train-0", "memory-unrepairable": "pod team/train-0", "row-remap-failed": "pod team/train-0", "xid": "pod team/train-0",
		"uncorrected-ecc": "pod team/train-0", "fabric-unhealthy": "pod team/train-0", "throttled": "pod team/train-0", "cordoned": "",
	} {
		for _, device := range []string{"gpu-0000-1b-00-0-observer", "gpu-0000-1b-00-0"} {
			w := newWorld(t)
			w.observe("agent", device)
			w.taint("gpu-1", "0000-1b-00-0", taint, "", resourceapi.DeviceTaintEffectNoSchedule)
			all := allFindings(w.examine(t))
			if len(all) != 1 || objects(all[0].Pods, false) != want || strings.Contains(strings.Join(all[0].Commands, " "), "agent") {
				t.Errorf("%s, %s: %+v", taint, device, all)
			}
		}
	}
	w := newWorld(t)
	w.observe("agent", "gpu-0000-1b-00-0-observer")
	w.taint("gpu-1", "0000-43-00-0", "gpu-lost", "", resourceapi.DeviceTaintEffectNoSchedule)
	if all := allFindings(w.examine(t)); len(all) != 1 || len(all[0].Pods) > 0 {
		t.Errorf("another GPU: %+v", all)
	}
}

// TestUnseenPods: whom a fault affects is unknown where claims may not be read.
func TestUnseenPods(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	lose(w)
	w.forbidden["resourceclaims"] = true
	if c := result(t, w.examine(t), "gpus"); len(c.Findings) != 1 || !strings.Contains(c.Findings[0].Message, "Which pods use it is unknown") || len(c.Findings[0].Pods) > 0 {
		t.Errorf("%+v", c)
	}
}

// TestHealed: what is over is history. An empty, healthy cluster was not green for an hour.
func TestHealed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPULost", "GPUs 0000:1b:00.0, 0000:43:00.0: the GPU is lost.", 30*time.Minute)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUXID", "GPU 0000:1b:00.0: XID 79.", 20*time.Minute)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUsWithoutClaims", "Containers have GPUs.", 20*time.Minute)
	w.event("Node", "gpu-1", driver, corev1.EventTypeNormal, "GPUsOnlyWithClaims", "Not any more.", 10*time.Minute)
	for _, reason := range []string{"GPULost", "MPSServerLost"} {
		w.ofTenant("ResourceClaim", "gone", corev1.EventTypeWarning, reason, "Device gpu: the GPU is lost.", 20*time.Minute)
		w.ofTenant("Pod", "gone", corev1.EventTypeWarning, reason, "Device gpu of claim gone: the GPU is lost.", 20*time.Minute)
	}
	r := w.examine(t)
	if all := allFindings(r); len(all) > 0 || r.verdict() != nil {
		t.Errorf("%+v, %v", all, r.verdict())
	}
	if len(r.History) != 4 {
		t.Errorf("history: %+v", r.History)
	}
	compare(t, "healed.txt", text(t, r, printer.Format{}))
	var history strings.Builder
	if err := view(r, true).Write(&history, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	compare(t, "history.txt", history.String())
}

// TestLeftOverProcesses: that a claim is gone does not end what its processes do.
func TestLeftOverProcesses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.ofTenant("ResourceClaim", "gone", corev1.EventTypeWarning, "OrphanedClaimInUse", "Processes 17 use it.", 20*time.Minute)
	if c := result(t, w.examine(t), "driver-events"); c.Severity != Warning {
		t.Errorf("%+v", c)
	}
	w.ofTenant("ResourceClaim", "gone", corev1.EventTypeWarning, "OrphanedClaimReleased", "Released.", 10*time.Minute)
	// Users can write that, too.
	if r := w.examine(t); len(allFindings(r)) != 1 || len(r.History) != 1 {
		t.Errorf("%+v", r)
	}
}

// TestPartitionGone: the node is told nothing of a partition that is gone, and only one that was made by hand has the taint.
func TestPartitionGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.ofTenant("ResourceClaim", "train-0-gpu", corev1.EventTypeWarning, "PartitionGone", "Device gpu: it was removed.", time.Minute)
	if c := result(t, w.examine(t), "driver-events"); c.Severity != Warning || len(c.Findings) != 1 {
		t.Errorf("%+v", c)
	}
	d := w.device("gpu-1", "gpu-0000-1b-00-0-mig-1g10gb-6")
	d.Taints = []resourceapi.DeviceTaint{{Key: driver + "/gone", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	if all := allFindings(w.examine(t)); len(all) != 1 || !slices.Equal(all[0].Commands, []string{"kubectl delete pod -n team train-0"}) {
		t.Errorf("%+v", all)
	}
}

// TestSupervisorDown: that MPS is not available on each GPU of the node has the cause that mps-supervisor finds.
func TestSupervisorDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, gpu := range []string{"0000-1b-00-0", "0000-43-00-0"} {
		w.taint("gpu-1", gpu, "mps-unavailable", "", resourceapi.DeviceTaintEffectNoSchedule)
	}
	if all := allFindings(w.examine(t)); len(all) != 1 || all[0].Objects[0] != nodeRef("gpu-1") {
		t.Errorf("%+v", all)
	}
	// One that is being replaced is no finding, so that the taints are.
	w.supervisor("gpu-1").DeletionTimestamp = new(ago(0))
	w.supervisor("gpu-1").Finalizers = []string{"example.com/wait"}
	waits(w.supervisor("gpu-1"), "", "")
	if all := allFindings(w.examine(t)); len(all) != 1 || all[0].Objects[0] != nodeRef("gpu-1") {
		t.Errorf("%+v", all)
	}
	w.supervisor("gpu-1").DeletionTimestamp = nil
	waits(w.supervisor("gpu-1"), "ErrImagePull", "")
	if all := allFindings(w.examine(t)); len(all) != 1 || !strings.Contains(all[0].Message, "ErrImagePull") {
		t.Errorf("%+v", all)
	}
}

// uninstall is what is left of the driver.
func uninstall(w *world) {
	w.sets, w.configs, w.slices = nil, nil, nil
	w.pods = slices.DeleteFunc(w.pods, func(p *corev1.Pod) bool { return p.Namespace == install })
	w.classes = slices.DeleteFunc(w.classes, func(c *resourceapi.DeviceClass) bool { return c.Name != "mine" })
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPULost", "GPU 0000:1b:00.0: lost.", time.Minute)
}

// TestUninstalled: thirty findings with wrong remedies, such as to set what is set by default, were one: the driver is not installed.
func TestUninstalled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	uninstall(w)
	w.claims, w.templates = nil, nil
	r := w.examine(t)
	if all := allFindings(r); len(all) != 1 || !strings.Contains(all[0].Remedy, "helm install") || !errors.Is(r.verdict(), options.ErrFound) {
		t.Errorf("%+v", all)
	}

	w = newWorld(t)
	published := w.slices
	uninstall(w)
	w.slices = published
	r = w.examine(t)
	compare(t, "uninstalled.txt", text(t, r, printer.Format{}))
	for _, f := range allFindings(r) {
		if strings.Contains(f.Remedy, "deviceClasses.create") || strings.Contains(f.Remedy, "helm install") || strings.Contains(f.Remedy, "nodeSelector") {
			t.Errorf("%+v", f)
		}
	}
}

// TestUninstalling: while pods of the driver end, and its DaemonSet where that is deleted last, nobody is told to install it, or what to set.
func TestUninstalling(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	set, published := w.set(pluginLabel), w.slices
	plugins := []*corev1.Pod{w.plugin("gpu-1"), w.plugin("gpu-2")}
	uninstall(w)
	set.DeletionTimestamp, set.Finalizers = new(ago(time.Second)), []string{"foregroundDeletion"}
	w.sets, w.slices, w.pods, w.claims, w.templates = []*appsv1.DaemonSet{set}, published, append(w.pods, plugins...), nil, nil
	all := allFindings(w.examine(t))
	if len(all) != 2 || len(all[0].Objects) != 2 || all[0].Severity != Error || !strings.Contains(all[0].Message, "being uninstalled") ||
		!strings.Contains(all[1].Remedy, "the kubelet removes them") {
		t.Errorf("%+v", all)
	}
}

// TestNotKnownToBeUninstalled: without the right to see it, nobody says that there is no driver.
func TestNotKnownToBeUninstalled(t *testing.T) {
	t.Parallel()
	for _, resource := range []string{"daemonsets", "deviceclasses"} {
		w := newWorld(t)
		uninstall(w)
		w.forbidden[resource] = true
		r := w.examine(t)
		if c := result(t, r, "driver-daemonset"); c.Severity != Unknown || len(r.Checks) != len(Checks) {
			t.Errorf("%s: %+v", resource, c)
		}
	}
}

// TestCordoned: the command names the GPU as it is named everywhere.
func TestCordoned(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.taint("gpu-2", "0000-43-00-0", "cordoned", "", resourceapi.DeviceTaintEffectNoSchedule)
	f := allFindings(w.examine(t))
	if len(f) != 1 || !slices.Equal(f[0].Commands, []string{"kubectl gpu uncordon gpu-2/43:00"}) || len(f[0].Pods) > 0 {
		t.Fatalf("%+v", f)
	}
	snapshot, err := fleet.Read(t.Context(), w.client(), "")
	if err != nil {
		t.Fatal(err)
	}
	if g, err := fleet.New(snapshot, driver).GPU("gpu-2/43:00"); err != nil || g.PCIBusID != "0000:43:00.0" {
		t.Errorf("%+v, %v", g, err)
	}
}

// TestUnpublishedIsNotOver: no taint says that a fault is over only where there is something to taint.
func TestUnpublishedIsNotOver(t *testing.T) {
	t.Parallel()
	for name, hide := range map[string]func(*world){
		"the GPU":                func(w *world) { w.events[0].Message = "GPU 0000:99:00.0: the GPU is lost." },
		"all GPUs of the node":   func(w *world) { w.withoutSlices("gpu-1") },
		"slices may not be read": func(w *world) { w.forbidden["resourceslices"] = true },
		"all, of a whole node":   func(w *world) { w.withoutSlices("gpu-1"); w.events[0].Reason = "MPSUnavailable" },
	} {
		w := newWorld(t)
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPULost", "GPU 0000:1b:00.0: the GPU is lost.", 30*time.Minute)
		hide(w)
		r := w.examine(t)
		if c := result(t, r, "driver-events"); len(r.History) > 0 || c.Severity == OK {
			t.Errorf("%s: %+v, %+v", name, c, r.History)
		}
	}
	w := newWorld(t)
	w.event("Node", "gone", driver, corev1.EventTypeWarning, "GPULost", "GPU 0000:1b:00.0: the GPU is lost.", 30*time.Minute)
	if r := w.examine(t); len(r.History) != 1 || len(allFindings(r)) > 0 {
		t.Errorf("a node that is gone: %+v", r)
	}
}

// TestUnseenClaimIsNotOver: a claim that may not be read is not gone.
func TestUnseenClaimIsNotOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.ofTenant("ResourceClaim", "train-0-gpu", corev1.EventTypeWarning, "MPSServerLost", "It was lost.", 20*time.Minute)
	w.forbidden["resourceclaims"] = true
	if r := w.examine(t); len(r.History) > 0 || result(t, r, "driver-events").Severity != Warning {
		t.Errorf("%+v", r)
	}
}

// TestOtherDriverRemains: what NVIDIA's DRA driver has, whose name is the same, is not left of this one, and nobody is told to delete it.
func TestOtherDriverRemains(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	published := w.slices[:1]
	uninstall(w)
	w.slices = published
	w.slices[0].Spec.Devices = []resourceapi.Device{{Name: "gpu-0"}}
	w.claims[0].Status.Allocation.Devices.Results[0].Device = "gpu-0"
	for _, f := range allFindings(w.examine(t)) {
		if strings.Contains(f.Remedy, "delete resourceslices") || strings.Contains(f.Message, "which is gone") {
			t.Errorf("%+v", f)
		}
	}
}

// TestNotSeenToBeOver: a GPU that was throttled now had its trouble behind it, because a taint that keeps nobody away is published late.
func TestNotSeenToBeOver(t *testing.T) {
	t.Parallel()
	over := func(w *world, text string, before time.Duration) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeNormal, "GPURecovered", "GPU 0000:43:00.0: "+text+". Devices are offered again.", before)
	}
	written := func(w *world, at int, before time.Duration) {
		w.slices[at].ManagedFields = []metav1.ManagedFieldsEntry{{Time: new(ago(before))}}
	}
	cases := map[string]struct {
		change func(*world)
		over   bool
	}{
		"nothing else":           {change: func(*world) {}},
		"it is said to be over":  {func(w *world) { over(w, device.Throttled.Over(), time.Second) }, true},
		"it was over before":     {change: func(w *world) { over(w, device.Throttled.Over(), 3*time.Minute) }},
		"something else is over": {change: func(w *world) { over(w, device.XID.Over(), time.Second) }},
		"all was written since": {func(w *world) {
			for _, s := range w.slices {
				s.CreationTimestamp = ago(time.Second)
			}
		}, true},
		"it was written before":        {change: func(w *world) { written(w, 0, 3*time.Minute); written(w, 1, 3*time.Minute) }},
		"it would have been published": {func(w *world) { w.events[0].LastTimestamp = ago(11 * time.Minute) }, true},
	}
	for name, c := range cases {
		w := newWorld(t)
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUThrottled", "GPU 0000:43:00.0: its clocks are lowered.", 2*time.Minute)
		c.change(w)
		r := w.examine(t)
		all := allFindings(r)
		if c.over != (len(all) == 0) || c.over != (len(r.History) == 1) {
			t.Errorf("%s: %+v, %+v", name, all, r.History)
		}
		if !c.over && (all[0].Severity != Warning || !strings.Contains(all[0].Said, "may still hold") || all[0].Objects[0].Label == "") {
			t.Errorf("%s: %+v", name, all)
		}
	}
}

// TestSince: an incident is as old as what was told of it last, and not as a taint that is late; and history has its end.
func TestSince(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.taint("gpu-1", "0000-1b-00-0", "xid", "94", resourceapi.DeviceTaintEffectNone)
	e := w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUXID", "GPU 0000:1b:00.0: XID 94.", 50*time.Second)
	e.FirstTimestamp = ago(30 * time.Minute)
	if all := allFindings(w.examine(t)); len(all) != 1 || now.Sub(all[0].Since.Time) != 50*time.Second || all[0].Severity != Warning {
		t.Errorf("%+v", all)
	}
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPULost", "GPU 0000:1b:00.0: it is lost.", 22*time.Minute)
	for _, text := range []string{device.XID.Over(), device.Lost.Over()} {
		w.event("Node", "gpu-1", driver, corev1.EventTypeNormal, "GPURecovered", "GPU 0000:1b:00.0: "+text+".", 20*time.Minute)
	}
	r := w.examine(t)
	if all := allFindings(r); len(all) != 1 || now.Sub(all[0].Since.Time) != 50*time.Second {
		t.Errorf("%+v", all)
	}
	var history strings.Builder
	if err := view(r, true).Write(&history, printer.Format{}); err != nil || !strings.Contains(history.String(), "    22m–20m ago  GPU 0 (1b:00) on gpu-1: it is lost\n") {
		t.Errorf("%v, %s", err, history.String())
	}
}

// TestHeading: what is said belongs to what the heading says, and what is held back is over.
func TestHeading(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.taint("gpu-1", "0000-1b-00-0", "xid", "94", resourceapi.DeviceTaintEffectNone)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUXID", "GPU 0000:1b:00.0: XID 94. Nothing is wanted.", 50*time.Second)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPURecoveryRequired", "GPU 0000:1b:00.0: the driver wants a reset.", 40*time.Second)
	if all := allFindings(w.examine(t)); len(all) != 1 || all[0].Message != "XID 94" || all[0].Said != "XID 94. Nothing is wanted." {
		t.Errorf("%+v", all)
	}

	w = newWorld(t)
	w.taint("gpu-1", "0000-1b-00-0", "unresponsive", "", resourceapi.DeviceTaintEffectNoSchedule)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUUnresponsive", "GPU 0000:1b:00.0: a call hangs.", 5*time.Minute)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUHeldBack", "GPU 0000:1b:00.0: "+device.Unresponsive.Over()+", but not for the first time. It is offered again at 12:19.", 2*time.Minute)
	all := allFindings(w.examine(t))
	if len(all) != 1 || all[0].Severity != Warning || strings.Contains(all[0].Message, "does not answer") || !strings.Contains(all[0].Message, "held back") ||
		!strings.Contains(all[0].Said, "offered again at") || strings.Contains(all[0].Remedy, "NVIDIA driver") || len(all[0].Commands) > 0 {
		t.Errorf("%+v", all)
	}
	w.taint("gpu-1", "0000-1b-00-0", "gpu-lost", "", resourceapi.DeviceTaintEffectNoExecute)
	if all := allFindings(w.examine(t)); len(all) != 1 || all[0].Severity != Error || !strings.HasPrefix(all[0].Message, "lost, held back") {
		t.Errorf("%+v", all)
	}
}

// TestLostGPUIsOneEntry: that what a claim had cannot be removed from a GPU that is lost is no news.
func TestLostGPUIsOneEntry(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.taint("gpu-1", "0000-1b-00-0", "release-pending", "", resourceapi.DeviceTaintEffectNoSchedule)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUReleasePending", "GPU 0000:1b:00.0: it is held.", time.Second)
	if all := allFindings(w.examine(t)); len(all) != 1 || !strings.Contains(all[0].Remedy, "end what") {
		t.Errorf("%+v", all)
	}
	lose(w)
	if r := w.examine(t); len(allFindings(r)) != 1 || len(r.History) != 0 || !strings.HasPrefix(allFindings(r)[0].Message, "lost, XID 79, ") || !strings.Contains(allFindings(r)[0].Remedy, "restart") {
		t.Errorf("%+v", r)
	}
}

// TestCordonIsNoIncident: neither while it lasts nor afterwards.
func TestCordonIsNoIncident(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUCordoned", "GPU 0000:1b:00.0: an administrator keeps pods away.", 20*time.Minute)
	w.taint("gpu-1", "0000-43-00-0", "cordoned", "", resourceapi.DeviceTaintEffectNoSchedule)
	r := w.examine(t)
	if out := text(t, r, printer.Format{}); len(r.History) > 0 || r.verdict() != nil || !strings.Contains(out, "uncordon gpu-1/43:00") || !strings.Contains(out, "0 problems\n") {
		t.Errorf("%s", out)
	}
}

// more adds pods, each with a partition of its own of GPU 0 of gpu-1.
func (w *world) more(names ...string) {
	for i, name := range names {
		c := w.claims[0].DeepCopy()
		c.Name, c.Status.ReservedFor[0].Name, c.Status.ReservedFor[0].UID = name+"-gpu", name, types.UID(name)
		c.Status.Allocation.Devices.Results[0].Device = fmt.Sprintf("gpu-0000-1b-00-0-mig-1g10gb-%d", i)
		w.claims = append(w.claims, c)
		w.pods = append(w.pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: name, UID: types.UID(name), OwnerReferences: []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "r", Controller: new(true)}},
		}})
	}
}

var replicas = []string{"r-0", "r-1", "r-2", "r-3", "r-4"}

// TestAllPodsOfAnIncident: of five claims that had lost their partitions in a reset three were named, each as an incident of its own.
func TestAllPodsOfAnIncident(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.more(replicas...)
	for i, name := range append([]string{"train-0"}, replicas...) {
		w.ofTenant("ResourceClaim", name+"-gpu", corev1.EventTypeWarning, "PartitionGone", "Device gpu: it was removed.", time.Duration(i)*time.Second)
	}
	all := allFindings(w.examine(t))
	if len(all) != 1 || len(all[0].Pods) != 6 || all[0].Objects[0].Label != "GPU 0 (1b:00) on gpu-1" ||
		!slices.Equal(all[0].Commands, []string{"kubectl delete pod -n team train-0 r-0 r-1 r-2 r-3 r-4"}) ||
		!strings.Contains(all[0].Remedy, "No controller makes pod team/train-0 again") || strings.Contains(all[0].Remedy, "r-0") {
		t.Errorf("%+v", all)
	}
	w = newWorld(t)
	for _, name := range replicas {
		w.ofTenant("ResourceClaim", name, corev1.EventTypeWarning, "OrphanedClaimInUse", "Processes use it.", time.Minute)
	}
	if all := allFindings(w.examine(t)); len(all) != 1 || len(all[0].Objects) != 5 {
		t.Errorf("%+v", all)
	}
}

// TestServerLostIsOver when all containers of its pods that use it have started since.
func TestServerLostIsOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.more(replicas...)
	state := func(name string, started time.Duration, restarts int32) {
		p := named(w.pods, name)
		p.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}}, {Name: "log"}}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{
			{Name: "c", RestartCount: restarts, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: ago(started)}}},
			{Name: "log", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: ago(time.Hour)}}},
		}
	}
	for _, name := range replicas {
		w.ofTenant("ResourceClaim", name+"-gpu", corev1.EventTypeWarning, "MPSServerLost", "Device gpu: it was lost.", 2*time.Minute)
		state(name, time.Minute, 1)
	}
	state("r-1", 2*time.Minute+5*time.Second, 1) // before the driver has noticed
	named(w.pods, "r-2").Status.ContainerStatuses[0].State = corev1.ContainerState{}
	if r := w.examine(t); len(allFindings(r)) != 0 || len(r.History) != 1 {
		t.Errorf("%+v", r)
	}
	state("r-3", 2*time.Minute+5*time.Second, 0)
	all := allFindings(w.examine(t))
	if len(all) != 1 || len(all[0].Pods) != 1 || !slices.Equal(all[0].Commands, []string{"kubectl delete pod -n team r-3"}) {
		t.Errorf("%+v", all)
	}
	w.forbidden["pods"] = true
	if c := result(t, w.examine(t), "driver-events"); len(c.Findings) != 1 || len(c.Findings[0].Pods) != 5 {
		t.Errorf("%+v", c)
	}
}

// TestCordonOutlivesDriver: nothing else names an annotation that keeps pods away when the driver comes back.
func TestCordonOutlivesDriver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	uninstall(w)
	w.claims, w.templates = nil, nil
	w.node("gpu-1").Annotations = map[string]string{api.CordonAnnotation: "0000:1b:00.0"}
	c := result(t, w.examine(t), "leftovers")
	if len(c.Findings) != 1 || c.Findings[0].Objects[0] != nodeRef("gpu-1") || !strings.Contains(c.Findings[0].Remedy, api.CordonAnnotation+"-") {
		t.Errorf("%+v", c)
	}
}

// TestUninstallingUnseen: who may not read pods is not told to install a driver whose pods may not have ended.
func TestUninstallingUnseen(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	plugin := w.plugin("gpu-1")
	uninstall(w)
	w.pods, w.claims, w.templates = append(w.pods, plugin), nil, nil
	w.forbidden["pods"] = true
	if c := result(t, w.examine(t), "driver-daemonset"); !strings.Contains(c.Findings[0].Remedy, "could not be read") {
		t.Errorf("%+v", c)
	}
}
