//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// podUsing is a pod that prints what it sees and stays. The grace period is
// not zero: such pods vanish from the API before the kubelet has unprepared
// their claims.
func podUsing(name, claimSource string) string {
	return podDoing(name, "nvidia-smi -L; "+stay, claimSource)
}

// stay keeps a shell until its pod is deleted.
const stay = `trap "exit 0" TERM; while :; do sleep 3600 & wait $!; done`

// podDoing is a pod that runs a shell command, which may not have single quotes.
func podDoing(name, command, claimSource string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: %s
    imagePullPolicy: Never
    command: [sh, -c, '%s']
    resources: {claims: [{name: gpu}]}
  resourceClaims: [{name: gpu, %s}]
`, name, demoImage, command, claimSource)
}

func claim(name, request, config string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s}
spec:
  devices:
    requests: [{name: gpu, exactly: %s}]
    %s
---`, name, request, config)
}

const (
	wholeGPU = `{deviceClassName: gpu.nvidia.com}`
	oneSlice = `{deviceClassName: mig.nvidia.com, selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'"}}]}`
	noSuch   = `{deviceClassName: mig.nvidia.com, selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '9g.999gb'"}}]}`
)

// TestNoSuchDevice: a claim that no node can satisfy leaves the pod Pending
// with the scheduler's reason.
func TestNoSuchDevice(t *testing.T) {
	ns := namespace(t)
	apply(t, ns, claim("c", noSuch, "")+podUsing("p", "resourceClaimName: c"))
	eventually(t, "a scheduling reason", func(ctx context.Context) (bool, string) {
		p, err := client.CoreV1().Pods(ns).Get(ctx, "p", metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				return strings.Contains(c.Message, "cannot allocate all claims"), c.Message
			}
		}
		return false, "no PodScheduled condition"
	})
}

// TestInvalidConfig: an opaque config with a field that does not exist fails
// Prepare, and the pod's event names the field.
func TestInvalidConfig(t *testing.T) {
	for name, tc := range map[string]struct{ request, kind, parameters, want string }{
		"unknown field":      {wholeGPU, "GpuConfig", `sharring: {strategy: MPS}`, "sharring"},
		"bad interval":       {wholeGPU, "GpuConfig", `sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Forever}}`, "sharing.timeSlicingConfig.interval"},
		"partition, unknown": {oneSlice, "MigDeviceConfig", `share: {}`, "share"},
		"bad limit":          {wholeGPU, "GpuConfig", `sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 101}}`, "sharing.mpsConfig.defaultActiveThreadPercentage"},
	} {
		t.Run(name, func(t *testing.T) {
			ns := namespace(t)
			config := fmt.Sprintf(`config: [{requests: [gpu], opaque: {driver: %s, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: %s, %s}}}]`,
				driverName, tc.kind, tc.parameters)
			apply(t, ns, claim("c", tc.request, config)+podUsing("p", "resourceClaimName: c"))
			eventually(t, "an event that names "+tc.want, func(ctx context.Context) (bool, string) {
				all := events(ctx, ns, "p")
				for _, e := range all {
					if strings.HasPrefix(e, "FailedPrepareDynamicResources") && strings.Contains(e, tc.want) {
						return true, ""
					}
				}
				return false, strings.Join(all, " | ")
			})
		})
	}
	checkNothingLeft(t)
}

var migUUID = regexp.MustCompile(`MIG-[0-9a-f-]{36}`)

// TestSeveralPodsOneClaim: pods that share a claim see the same partition,
// which lives until the last of them is gone.
func TestSeveralPodsOneClaim(t *testing.T) {
	ns := namespace(t)
	apply(t, ns, claim("c", oneSlice, "")+podUsing("a", "resourceClaimName: c")+"---"+podUsing("b", "resourceClaimName: c"))
	seen := map[string]bool{}
	for _, pod := range []string{"a", "b"} {
		waitRunning(t, ns, pod)
		out := waitLog(t, ns, pod, "main", "MIG 1g.10gb")
		uuids := migUUID.FindAllString(out, -1)
		if len(uuids) != 1 {
			t.Fatalf("pod %s sees %d partitions, want exactly 1:\n%s", pod, len(uuids), out)
		}
		seen[uuids[0]] = true
	}
	if len(seen) != 1 {
		t.Errorf("the pods see different partitions: %v", seen)
	}

	if err := client.CoreV1().Pods(ns).Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "pod a gone", func(ctx context.Context) (bool, string) {
		_, err := client.CoreV1().Pods(ns).Get(ctx, "a", metav1.GetOptions{})
		return err != nil, "still there"
	})
	if n := instances(t); n != 1 {
		t.Errorf("%d GPU instances after the first of two pods ended, want 1", n)
	}
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// TestSeveralClaimsOnePod: whole GPU and partition from two claims in a pod.
func TestSeveralClaimsOnePod(t *testing.T) {
	ns := namespace(t)
	pod := strings.NewReplacer(
		"claims: [{name: gpu}]", "claims: [{name: gpu}, {name: part}]",
		"resourceClaims: [{name: gpu, resourceClaimName: whole}]",
		"resourceClaims: [{name: gpu, resourceClaimName: whole}, {name: part, resourceClaimName: part}]",
	).Replace(podUsing("p", "resourceClaimName: whole"))
	apply(t, ns, claim("whole", wholeGPU, "")+claim("part", oneSlice, "")+pod)
	waitRunning(t, ns, "p")
	out := waitLog(t, ns, "p", "main", "MIG 1g.10gb")
	if gpus := strings.Count(out, "UUID: GPU-"); gpus != 2 {
		t.Errorf("the pod sees %d GPUs, want the whole one and the partition's parent:\n%s", gpus, out)
	}
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

func instances(t *testing.T) int {
	n := 0
	for _, g := range showMachine(t).GPUs {
		if g.MIG != nil {
			n += len(g.MIG.Instances)
		}
	}
	return n
}
