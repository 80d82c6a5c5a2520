//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestNodeNotReady takes the NVIDIA driver away from a running plugin, and checks that the kubelet's event says why the pod is not
// ready, that it is again with the driver, and that neither container is restarted.
func TestNodeNotReady(t *testing.T) {
	reserveNode(t)
	before := map[string]corev1.Pod{}
	for _, component := range []string{pluginComponent, supervisorComponent} {
		before[component] = driverPod(t, component)
	}
	const driverNotLoaded = "9"
	fault, err := gpusim(t.Context(), "fault", "add", "--root", machineRoot, "--function", "*", "--code", driverNotLoaded)
	if err != nil {
		t.Fatal(err)
	}
	load := func(ctx context.Context) error {
		_, err := gpusim(ctx, "fault", "rm", "--root", machineRoot, strings.TrimSpace(string(fault)))
		return err
	}
	t.Cleanup(func() { _ = load(context.WithoutCancel(t.Context())) }) // again, if the test has ended before it did

	plugin := before[pluginComponent].Name
	waitEvent(t, driverNamespace, plugin, "Unhealthy", "Readiness probe failed: open NVML library")
	waitDriver(t, pluginComponent, corev1.ConditionFalse)
	waitDriver(t, supervisorComponent, corev1.ConditionTrue)
	if err := load(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitDriver(t, pluginComponent, corev1.ConditionTrue)
	for component, pod := range before {
		if out, err := inPod(driverNamespace, pod.Name, "health-probe", "readiness"); err != nil || out != "" {
			t.Errorf("%s: health-probe says %q, %v", component, out, err)
		}
		now := driverPod(t, component)
		if was, is := pod.Status.ContainerStatuses[0].RestartCount, now.Status.ContainerStatuses[0].RestartCount; now.Name != pod.Name || was != is {
			t.Errorf("%s: pod %s with %d restarts is now %s with %d", component, pod.Name, was, now.Name, is)
		}
	}
}

// waitDriver waits until a pod of the driver is ready, or is not.
func waitDriver(t *testing.T, component string, ready corev1.ConditionStatus) {
	t.Helper()
	eventually(t, fmt.Sprintf("the condition Ready=%s of %s", ready, component), func(ctx context.Context) (bool, string) {
		pod := driverPod(t, component)
		return condition(&pod, corev1.PodReady).Status == ready, strings.Join(events(ctx, driverNamespace, pod.Name), " | ")
	})
}
