//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// deviceStatus is the part of what the driver says about a device that the test uses.
type deviceStatus struct {
	APIVersion, Type, UUID, ParentUUID string
}

// waitClaimStatus waits for the status of a claim's only device, "Ready=True Ready", and returns what the driver says about it.
func waitClaimStatus(t *testing.T, ns, name, want string) (entry resourceapi.AllocatedDeviceStatus, said deviceStatus) {
	t.Helper()
	eventually(t, "status of claim "+name+": "+want, func(ctx context.Context) (bool, string) {
		c, err := client.ResourceV1().ResourceClaims(ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		got := "none"
		if devices := c.Status.Devices; len(devices) == 1 && len(devices[0].Conditions) == 1 {
			entry = devices[0]
			condition := entry.Conditions[0]
			got = fmt.Sprintf("%s=%s %s", condition.Type, condition.Status, condition.Reason)
		}
		return got == want, fmt.Sprintf("%s: %+v", got, c.Status.Devices)
	})
	if entry.Data != nil {
		if err := json.Unmarshal(entry.Data.Raw, &said); err != nil {
			t.Fatal(err)
		}
	}
	return entry, said
}

// waitHealth waits until the status of a pod's container says how the devices of a claim are.
func waitHealth(t *testing.T, ns, pod, claim string, want corev1.ResourceHealthStatus, says string) {
	t.Helper()
	eventually(t, fmt.Sprintf("health of claim %s in the status of pod %s: %s", claim, pod, want), func(ctx context.Context) (bool, string) {
		p, err := client.CoreV1().Pods(ns).Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		if len(p.Status.ContainerStatuses) == 0 {
			return false, "no container"
		}
		all := p.Status.ContainerStatuses[0].AllocatedResourcesStatus
		for _, r := range all {
			for _, h := range r.Resources {
				if strings.HasPrefix(string(r.Name), "claim:"+claim) && h.Health == want && (says == "" || h.Message != nil && strings.Contains(*h.Message, says)) {
					return true, ""
				}
			}
		}
		return false, fmt.Sprintf("%+v", all)
	})
}

// TestClaimStatus checks that the status of a claim names the partition that its container has, that the container can read about it,
// that the claim has a record, that a GPU that must be reset shows in the claim and in the pod, and that nothing is said of a claim that is not prepared.
func TestClaimStatus(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	apply(t, ns, claim("c", oneSlice.on(gpus...), "")+podUsing("p", "c"))
	waitRunning(t, ns, "p")
	uuid := migUUID.FindString(waitLog(t, ns, "p", "main", "MIG 1g.10gb"))
	if _, said := waitClaimStatus(t, ns, "c", "Ready=True Ready"); said.UUID != uuid || said.ParentUUID != gpus[0].UUID || said.Type != "mig" || said.APIVersion == "" {
		t.Errorf("the container has %s of GPU %s, the status says %+v", uuid, gpus[0].UUID, said)
	}
	waitHealth(t, ns, "p", "c", corev1.ResourceHealthStatusHealthy, "")
	if uid, all := claimUIDs(t, ns)[0], records(); !strings.Contains(strings.Join(all, "\n"), uid) {
		t.Errorf("claim %s has no record where tests look for what is left: %v", uid, all)
	}

	out, err := inPod(ns, "p", "cat", "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/c/gpu/"+driverName+"-metadata.json")
	if err != nil {
		t.Errorf("reading the metadata of the device: %v\n%s", err, out)
	}
	wantAll(t, "metadata", out, uuid, gpus[0].UUID, "metadata.resource.k8s.io/v1beta1", `"gpuInstanceID"`, `"multiprocessors"`)

	onGPU(t, gpus[0], "gpu", "--failure", "reset-required")
	t.Cleanup(func() { onGPU(t, gpus[0], "gpu", "--failure", "none") })
	entry, said := waitClaimStatus(t, ns, "c", "Ready=False GPUResetRequired")
	if said.UUID != uuid || !strings.Contains(entry.Conditions[0].Message, "delete the pod") {
		t.Errorf("%+v: %s", said, entry.Conditions[0].Message)
	}
	waitHealth(t, ns, "p", "c", corev1.ResourceHealthStatusUnhealthy, "The GPU does nothing until")
	onGPU(t, gpus[0], "gpu", "--failure", "none")
	waitClaimStatus(t, ns, "c", "Ready=True Ready")
	waitHealth(t, ns, "p", "c", corev1.ResourceHealthStatusHealthy, "")

	deletePod(t, ns, "p")
	waitClaimStatus(t, ns, "c", "none")
}
