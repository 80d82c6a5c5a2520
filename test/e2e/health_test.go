//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// healthSuite is the suite on a cluster of which a Prometheus knows.
const healthSuite = "health"

// TestHealth lets GPUs fail while pods use them, and checks all places in which that is to be seen, what follows, and that all is well
// afterwards without a restart of the driver.
func TestHealth(t *testing.T) {
	if suite != healthSuite {
		t.Skip("needs the cluster of suite " + healthSuite)
	}
	before := driverPod(t, pluginComponent)
	h := healthTest{watcher: startWatcher(t), node: before.Spec.NodeName}
	t.Run("scenarios", func(t *testing.T) {
		t.Run("XIDOnPartition", h.xidOnPartition)
		t.Run("GPULost", h.gpuLost)
		t.Run("NVMLHangs", h.nvmlHangs)
		t.Run("SupervisorGone", h.supervisorGone)
	})
	after := driverPod(t, pluginComponent)
	if restarts := after.Status.ContainerStatuses[0].RestartCount; after.UID != before.UID || restarts != 0 {
		t.Errorf("the plugin was %s and is %s, restarted %d times", before.Name, after.Name, restarts)
	}
}

// healthTest is what the scenarios have in common.
type healthTest struct {
	watcher
	node string
}

// signs are where it is to be seen that the device of a claim is not well.
type signs struct {
	// reason is that of events and of the claim's condition, metric that of the metric and the taint, whose value and effect follow.
	reason, metric string
	health         corev1.ResourceHealthStatus
	// says is a part of what the pod's status, its event and the claim's condition say.
	says  string
	alert string
}

// wantSigns waits for all signs on a pod, its claim, and its GPU.
func (h healthTest) wantSigns(t *testing.T, ns string, p corev1.Pod, gpu simulatedGPU, s signs) {
	t.Helper()
	claimName := claimOf(t, p)
	h.wait(t, fmt.Sprintf("max_over_time(partage_gpu_condition{gpu=%q, reason=%q}[1h]) == 1", gpu.PCIAddress, s.metric), true)
	waitEvent(t, ns, p.Name, s.reason, s.says)
	waitEvent(t, ns, claimName, s.reason, s.says)
	waitEvent(t, metav1.NamespaceDefault, h.node, s.reason, gpu.PCIAddress)
	entry, _ := waitClaimStatus(t, ns, claimName, "Ready=False "+s.reason)
	if message := entry.Conditions[0].Message; !strings.Contains(message, s.says) {
		t.Errorf("claim %s: the message of the condition Ready lacks %q: %s", claimName, s.says, message)
	}
	waitHealth(t, ns, p.Name, p.Spec.ResourceClaims[0].Name, s.health, s.says)
	h.waitFired(t, s.alert, gpu.PCIAddress)
}

// waitOver waits until nothing is wrong with a GPU any more.
func (h healthTest) waitOver(t *testing.T, gpu simulatedGPU) {
	t.Helper()
	waitTaints(t, gpu, "", nil)
	h.wait(t, fmt.Sprintf("partage_gpu_condition{gpu=%q} == 1", gpu.PCIAddress), false)
	h.wait(t, fmt.Sprintf("partage_gpu_healthy{gpu=%q} == 1", gpu.PCIAddress), true)
	waitEvent(t, metav1.NamespaceDefault, h.node, "GPURecovered", gpu.PCIAddress)
	h.waitEnded(t, gpu.PCIAddress)
}

// claimOf returns the name of the only claim of a pod.
func claimOf(t *testing.T, p corev1.Pod) string {
	t.Helper()
	for _, s := range p.Status.ResourceClaimStatuses {
		if s.ResourceClaimName != nil {
			return *s.ResourceClaimName
		}
	}
	if name := p.Spec.ResourceClaims[0].ResourceClaimName; name != nil {
		return *name
	}
	t.Fatalf("pod %s has no claim: %+v", p.Name, p.Status)
	return ""
}

// deviceOf returns the device that a claim was allocated.
func deviceOf(t *testing.T, ns, claimName string) string {
	t.Helper()
	c, err := client.ResourceV1().ResourceClaims(ns).Get(t.Context(), claimName, metav1.GetOptions{})
	if err != nil || c.Status.Allocation == nil {
		t.Fatalf("claim %s: %v, %+v", claimName, err, c)
	}
	return c.Status.Allocation.Devices.Results[0].Device
}

// waitTaints waits until exactly these devices of a GPU have a taint, given as "key=value:effect"; "" is any that says that something is
// wrong.
func waitTaints(t *testing.T, gpu simulatedGPU, taint string, want []string) {
	t.Helper()
	eventually(t, fmt.Sprintf("taint %q on %v of GPU %s", taint, want, gpu.PCIAddress), func(ctx context.Context) (bool, string) {
		published, err := publishedSlices(ctx)
		if err != nil {
			return false, err.Error()
		}
		var got, all []string
		for _, s := range published {
			for _, d := range s.Spec.Devices {
				if uuid := d.Attributes["parentUUID"].StringValue; uuid == nil || *uuid != gpu.UUID {
					continue
				}
				for _, have := range d.Taints {
					text := fmt.Sprintf("%s=%s:%s", have.Key, have.Value, have.Effect)
					all = append(all, d.Name+" "+text)
					if taint == "" && have.Key != driverName+"/admin-access" || text == driverName+"/"+taint {
						got = append(got, d.Name)
					}
				}
			}
		}
		slices.Sort(got)
		return slices.Equal(got, want), strings.Join(all, ", ")
	})
}

// devicesOf returns the devices of a GPU of some kinds, in order.
func devicesOf(t *testing.T, gpu simulatedGPU, kinds ...string) []string {
	t.Helper()
	published, err := publishedSlices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range published {
		for _, d := range s.Spec.Devices {
			if uuid := d.Attributes["parentUUID"].StringValue; uuid != nil && *uuid == gpu.UUID && slices.Contains(kinds, *d.Attributes["type"].StringValue) {
				names = append(names, d.Name)
			}
		}
	}
	slices.Sort(names)
	if len(names) == 0 {
		t.Fatalf("GPU %s has no devices of the kinds %v", gpu.PCIAddress, kinds)
	}
	return names
}

// onGPU runs a command of the simulator on a GPU, also while the test is cleaned up, and returns what it printed.
func onGPU(t *testing.T, gpu simulatedGPU, args ...string) string {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	machine, err := readMachine(ctx)
	if err != nil {
		t.Fatal(err)
	}
	index := slices.IndexFunc(machine.GPUs, func(g simulatedGPU) bool { return g.UUID == gpu.UUID })
	out, err := gpusim(ctx, append(args, "--gpu", strconv.Itoa(index), "--root", machineRoot)...)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// untilTold lists the devices of a container and stays until it gets SIGUSR1: a pod that is evicted remains to be looked at.
const untilTold = `nvidia-smi -L; trap "" TERM; trap "exit 0" USR1; while :; do sleep 3600 & wait $!; done`

// deployUntilTold starts pods with a claim each that stay, when they are deleted, until endPod is called, and returns them.
func deployUntilTold(t *testing.T, ns, name string, replicas int, r request) []corev1.Pod {
	t.Helper()
	t.Cleanup(func() {
		kubectl(t, "delete", "deployments", "--all", "-n", ns)
		pods, err := client.CoreV1().Pods(ns).List(context.WithoutCancel(t.Context()), metav1.ListOptions{LabelSelector: "app=" + name})
		if err != nil {
			t.Error(err)
			return
		}
		for _, p := range pods.Items {
			// One that has ended already needs no signal.
			_, _ = tellToEnd(ns, p.Name)
		}
	})
	apply(t, ns, deploymentRunning(name, replicas, untilTold, 120, fmt.Sprintf("{name: gpu, exactly: %s}", r)))
	pods := waitPods(t, ns, name, replicas)
	for _, p := range pods {
		waitLog(t, ns, p.Name, "main", "UUID: ")
	}
	return pods
}

// endPod ends an evicted pod of deployUntilTold and waits until it is gone.
func endPod(t *testing.T, ns, pod string) {
	t.Helper()
	eventually(t, "pod "+pod+" gone", func(ctx context.Context) (bool, string) {
		if _, err := client.CoreV1().Pods(ns).Get(ctx, pod, metav1.GetOptions{}); err != nil {
			return apierrors.IsNotFound(err), err.Error()
		}
		// The command may be killed with the container that it ends, so its result says nothing.
		out, err := tellToEnd(ns, pod)
		return false, fmt.Sprintf("%v: %s", err, out)
	})
}

// tellToEnd sends the signal that ends a pod of deployUntilTold.
func tellToEnd(ns, pod string) (string, error) { return inPod(ns, pod, "sh", "-c", "kill -USR1 1") }

// waitEvicted waits until a pod is being deleted, because of its device, and others run in its place. It returns all that run.
func waitEvicted(t *testing.T, ns, name string, evicted corev1.Pod, running int) []corev1.Pod {
	t.Helper()
	waitEvent(t, ns, evicted.Name, "DeviceTaintManagerEviction", "")
	// The event comes before the deletion.
	eventually(t, fmt.Sprintf("the deletion of pod %s", evicted.Name), func(ctx context.Context) (bool, string) {
		p, err := client.CoreV1().Pods(ns).Get(ctx, evicted.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, ""
		}
		if err != nil {
			return false, err.Error()
		}
		return p.UID != evicted.UID || p.DeletionTimestamp != nil, string(p.Status.Phase)
	})
	return waitPods(t, ns, name, running)
}
