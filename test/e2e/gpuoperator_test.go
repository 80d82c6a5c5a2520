//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// The label that NVIDIA's GPU Operator, from 26.7 on, gives nodes with GPUs, and what its driver manager 0.12 sets it to while it replaces
// the driver of a node.
const (
	clientLabel = "nvidia.com/gpu.deploy.client"
	paused      = "paused-for-driver-upgrade"
)

// TestNodeDriverReplaced does to the node's label what the GPU Operator does when it replaces NVIDIA's driver: first, as it should be,
// without claims, and then while they are held, which is what its driver manager does when the driver's pod alone is started anew.
func TestNodeDriverReplaced(t *testing.T) {
	ns := reserveNode(t)
	becomeOperatorClient(t)
	driverLeaves := func() {
		t.Helper()
		// The driver manager waits for those whose DaemonSet has put the label into their node selector.
		for _, component := range []string{pluginComponent, supervisorComponent} {
			if pod := driverPod(t, component); pod.Spec.NodeSelector[clientLabel] != "true" {
				t.Errorf("pod %s has the node selector %v: nobody waits for it", pod.Name, pod.Spec.NodeSelector)
			}
		}
		labelNode(t, paused)
		waitNoPods(t, release+"-"+pluginComponent)
		waitNoPods(t, release+"-"+supervisorComponent)
	}
	driverComesBack := func() {
		t.Helper()
		labelNode(t, "true")
		waitDriverBack(t)
	}

	runningPartition(t, ns, "before")
	removePods(t, ns)
	driverLeaves()
	checkNothingLeft(t)
	driverComesBack()

	uuid := runningPartition(t, ns, "stays")
	apply(t, ns, claim("leaves", oneSlice, "")+podRunning("leaves", "POD=leaves exec sleep 86400", "leaves"))
	waitRunning(t, ns, "leaves")
	runningClient(t, ns, "client", mpsShare("10Gi", 25))
	driverLeaves()
	code, out, errors := kubectlGPU(t, "doctor")
	if code == exitFine || !strings.Contains(out, "The GPU operator keeps the driver off the node") {
		t.Errorf("kubectl gpu doctor: exit code %d:\n%s%s", code, out, errors)
	}
	wantDevice(t, ns, "stays", uuid)
	// None of the driver's pods is there to release devices, or to prepare them.
	if err := client.CoreV1().Pods(ns).Delete(t.Context(), "leaves", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process of pod leaves to end", func(context.Context) (bool, string) {
		left := processes(t, "sleep", "POD=leaves")
		return len(left) == 0, fmt.Sprint(left)
	})
	apply(t, ns, claim("late", oneSlice, "")+podUsing("late", "late"))
	eventually(t, "pod late to be told why it does not start", func(ctx context.Context) (bool, string) {
		seen := events(ctx, ns, "late")
		// Half a minute later the kubelet has removed the slices, and nothing can be scheduled.
		told := slices.ContainsFunc(seen, func(e string) bool { return isFailedPrepare(e) || strings.HasPrefix(e, "FailedScheduling: ") })
		return told, strings.Join(seen, " | ")
	})
	if pod, err := client.CoreV1().Pods(ns).Get(t.Context(), "leaves", metav1.GetOptions{}); err != nil || pod.DeletionTimestamp == nil {
		t.Errorf("a pod with a claim has ended without the driver: %v", err)
	}

	driverComesBack()
	eventually(t, "pod leaves to be gone", func(ctx context.Context) (bool, string) {
		_, err := client.CoreV1().Pods(ns).Get(ctx, "leaves", metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
	eventually(t, "pod late to run", func(ctx context.Context) (bool, string) {
		pod, err := client.CoreV1().Pods(ns).Get(ctx, "late", metav1.GetOptions{})
		return err == nil && pod.Status.Phase == corev1.PodRunning, strings.Join(events(ctx, ns, "late"), " | ")
	})
	wantDevice(t, ns, "stays", uuid)
	// What MPS serves ends with the supervisor.
	waitLoss(t, ns, "client")
	removePods(t, ns)
	checkNothingLeft(t)
}

// labelNode gives the node the operator's label.
func labelNode(t *testing.T, value string) {
	t.Helper()
	nodes, err := client.CoreV1().Nodes().List(context.WithoutCancel(t.Context()), metav1.ListOptions{})
	if err != nil || len(nodes.Items) != 1 {
		t.Fatalf("nodes: %v, %v", nodes, err)
	}
	patch := fmt.Sprintf(`{"metadata": {"labels": {%q: %q}}}`, clientLabel, value)
	_, err = client.CoreV1().Nodes().Patch(context.WithoutCancel(t.Context()), nodes.Items[0].Name, types.MergePatchType, []byte(patch),
		metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
}
