//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// mpsShare is a request for a share with these limits.
func mpsShare(memory string, percent int) string {
	return fmt.Sprintf(`{deviceClassName: mps.partage.dev, capacity: {requests: {memory: %s, smPercent: %d}}}`, memory, percent)
}

// elsewhere narrows a request down to other GPUs than the one.
func elsewhere(request, uuid string) string {
	return strings.Replace(request, "{",
		fmt.Sprintf(`{selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].parentUUID != '%s'"}}], `, uuid), 1)
}

// holding is a command that shows its limits and then holds memory of its GPU.
func holding(memory string) string {
	return "cuda-client info; exec cuda-client hold --memory " + memory
}

const throughMPS = "runs: as a client of an MPS server"

var gpuUUID = regexp.MustCompile(`GPU-[0-9a-f-]{36}`)

// runningClient starts a pod that is a client of MPS and returns its GPU's UUID.
func runningClient(t *testing.T, ns, name, request string) string {
	t.Helper()
	apply(t, ns, claim(name, request, "")+podDoing(name, holding("1Gi"), "resourceClaimName: "+name))
	waitRunning(t, ns, name)
	out := waitLog(t, ns, name, "main", "ready")
	if !strings.Contains(out, throughMPS) {
		t.Errorf("pod %s is no client of MPS:\n%s", name, out)
	}
	return gpuUUID.FindString(out)
}

// inPod runs a command in a pod's first container.
func inPod(ns, pod string, command ...string) (string, error) {
	out, err := exec.Command("kubectl", append([]string{"exec", "-n", ns, pod, "--"}, command...)...).CombinedOutput()
	return string(out), err
}

func deletePod(t *testing.T, ns, name string) {
	t.Helper()
	if err := client.CoreV1().Pods(ns).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "pod "+name+" gone", func(ctx context.Context) (bool, string) {
		_, err := client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		return err != nil, "still there"
	})
}

func wantAll(t *testing.T, what, got string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(got, part) {
			t.Errorf("%s lacks %q:\n%s", what, part, got)
		}
	}
}

// TestSharesOfDifferentSize: claims on one GPU have the limits that they asked
// for. A program that forgets its own has that of the largest share, which the
// server holds, and never none.
func TestSharesOfDifferentSize(t *testing.T) {
	ns := namespace(t)
	apply(t, ns, claim("large", mpsShare("20Gi", 50), "")+podDoing("large", holding("16Gi"), "resourceClaimName: large"))
	apply(t, ns, claim("small", mpsShare("10Gi", 25), "")+
		podDoing("small", "cuda-client alloc 12Gi; "+holding("8Gi"), "resourceClaimName: small"))
	waitRunning(t, ns, "large")
	waitRunning(t, ns, "small")
	large, small := waitLog(t, ns, "large", "main", "ready"), waitLog(t, ns, "small", "main", "ready")
	wantAll(t, "the large share", large, "limit 20480 MiB", "(50 %)", throughMPS, "allocated 16384 MiB")
	wantAll(t, "the small share", small, "limit 10240 MiB", "(25 %)", throughMPS, "out of memory (12288 MiB wanted)", "allocated 8192 MiB")
	if a, b := gpuUUID.FindString(large), gpuUUID.FindString(small); a != b {
		t.Fatalf("the shares are on two GPUs, %s and %s", a, b)
	}

	forgetful := []string{"env", "-i", "/usr/bin/cuda-client", "info"}
	out, err := inPod(ns, "small", forgetful...)
	if err != nil {
		t.Fatalf("%v: %v\n%s", forgetful, err, out)
	}
	wantAll(t, "a program without environment", out, "limit 20480 MiB", "(50 %)", throughMPS)
	deletePod(t, ns, "large")
	eventually(t, "the server to have the small share's limits", func(context.Context) (bool, string) {
		out, err := inPod(ns, "small", forgetful...)
		return err == nil && strings.Contains(out, "limit 10240 MiB") && strings.Contains(out, "(25 %)"), out
	})
	wantAll(t, "the small share afterwards", logs(t, ns, "small", "main"), "ready")
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// TestContainersWithAShareEach: two containers of a pod, each with a claim on the
// same GPU.
func TestContainersWithAShareEach(t *testing.T) {
	ns := namespace(t)
	apply(t, ns, claim("a", mpsShare("4Gi", 10), "")+claim("b", mpsShare("6Gi", 20), "")+fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: a, image: %[1]s, command: [sh, -c, '%[2]s'], resources: {claims: [{name: a}]}}
  - {name: b, image: %[1]s, command: [sh, -c, '%[2]s'], resources: {claims: [{name: b}]}}
  resourceClaims: [{name: a, resourceClaimName: a}, {name: b, resourceClaimName: b}]
`, demoImage, holding("2Gi")))
	waitRunning(t, ns, "p")
	a, b := waitLog(t, ns, "p", "a", "ready"), waitLog(t, ns, "p", "b", "ready")
	wantAll(t, "container a", a, "limit 4096 MiB", "(10 %)", throughMPS)
	wantAll(t, "container b", b, "limit 6144 MiB", "(20 %)", throughMPS)
	if gpuUUID.FindString(a) != gpuUUID.FindString(b) {
		t.Errorf("the containers see different GPUs:\n%s\n%s", a, b)
	}
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// TestTwoSharesInOneContainer: a process is a client of one daemon only, and of one
// claim's limits, so such a container does not start and its pod says why.
func TestTwoSharesInOneContainer(t *testing.T) {
	// Together they are more than one GPU has, or not.
	for name, percent := range map[string]int{"of one GPU": 20, "of two GPUs": 90} {
		t.Run(name, func(t *testing.T) {
			ns := namespace(t)
			apply(t, ns, claim("a", mpsShare("4Gi", 20), "")+claim("b", mpsShare("4Gi", percent), "")+fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: %s, command: [sh, -c, 'cuda-client info'], resources: {claims: [{name: a}, {name: b}]}}
  resourceClaims: [{name: a, resourceClaimName: a}, {name: b, resourceClaimName: b}]
`, demoImage))
			eventually(t, "an event that says that a container can have one share", func(ctx context.Context) (bool, string) {
				all := strings.Join(events(ctx, ns, "p"), " | ")
				return strings.Contains(all, "one MPS share only"), all
			})
			if out := containerLog(t, ns, "p"); strings.Contains(out, "device 0") {
				t.Errorf("the container ran:\n%s", out)
			}
		})
	}
	checkNothingLeft(t)
}

// containerLog is empty for a container that has never run.
func containerLog(t *testing.T, ns, pod string) string {
	t.Helper()
	p, err := client.CoreV1().Pods(ns).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range p.Status.ContainerStatuses {
		if s.State.Running != nil || s.LastTerminationState.Terminated != nil && s.LastTerminationState.Terminated.ContainerID != "" {
			return logs(t, ns, pod, s.Name)
		}
	}
	return ""
}

const mpsConfig = `config: [{requests: [gpu], opaque: {driver: %s, parameters: {
  apiVersion: resource.nvidia.com/v1beta1, kind: %s, sharing: {strategy: MPS, mpsConfig: {%s}}}}}]`

// TestMPSOfOwnDevices: claims that have devices alone set limits for their own
// processes, on the server, by device.
func TestMPSOfOwnDevices(t *testing.T) {
	for name, tc := range map[string]struct {
		request, kind, limits string
		want                  []string
	}{
		"GPU": {
			wholeGPU, "GpuConfig", `defaultActiveThreadPercentage: 30, defaultPinnedDeviceMemoryLimit: 20Gi`,
			[]string{"device 0: NVIDIA", "limit 20480 MiB", "(30 %)"},
		},
		"two GPUs": {
			`{deviceClassName: gpu.nvidia.com, count: 2}`, "GpuConfig",
			`defaultPinnedDeviceMemoryLimit: 20Gi, defaultPerDevicePinnedMemoryLimit: {"1": 5Gi}`,
			[]string{"device 0: NVIDIA", "limit 20480 MiB", "device 1: NVIDIA", "limit 5120 MiB", "(100 %)"},
		},
		"partition": {
			oneSlice, "MigDeviceConfig", `defaultActiveThreadPercentage: 50, defaultPinnedDeviceMemoryLimit: 4Gi`,
			[]string{"MIG 1g.10gb", "limit 4096 MiB", "(50 %)"},
		},
		"users": {
			wholeGPU, "GpuConfig", `multiUser: true`, []string{"no limit", "(100 %)"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			ns := namespace(t)
			apply(t, ns, claim("c", tc.request, fmt.Sprintf(mpsConfig, driverName, tc.kind, tc.limits))+
				podDoing("a", holding("1Gi"), "resourceClaimName: c")+"---"+podDoing("b", holding("1Gi"), "resourceClaimName: c"))
			for _, pod := range []string{"a", "b"} {
				waitRunning(t, ns, pod)
				wantAll(t, "pod "+pod, waitLog(t, ns, pod, "main", "ready"), append(tc.want, throughMPS)...)
			}
			// The limits are the server's, not the environment's.
			out, err := inPod(ns, "b", "env", "-i", "/usr/bin/cuda-client", "info")
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			wantAll(t, "a program without environment", out, append(tc.want, throughMPS)...)
		})
	}
	checkNothingLeft(t)
}

// TestInterval: a claim that has a GPU alone chooses how long turns are, and
// leaves the GPU as it was.
func TestInterval(t *testing.T) {
	ns := namespace(t)
	config := fmt.Sprintf(`config: [{requests: [gpu], opaque: {driver: %s, parameters: {
  apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}}}}]`, driverName)
	apply(t, ns, claim("c", wholeGPU, config)+podUsing("p", "resourceClaimName: c"))
	waitRunning(t, ns, "p")
	wantIntervals(t, gpuUUID.FindString(waitLog(t, ns, "p", "main", "UUID: GPU-")), "long")
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// wantIntervals fails unless one GPU has a time slice, and all others the default.
func wantIntervals(t *testing.T, uuid, interval string) {
	t.Helper()
	for _, g := range showMachine(t).GPUs {
		want := "default"
		if g.UUID == uuid {
			want = interval
		}
		if g.TimeSlice != want {
			t.Errorf("GPU %s has time slice %s, want %s", g.PCIAddress, g.TimeSlice, want)
		}
	}
}

const sharingMachine = "mixed-mig"

// TestIntervalOfShares: the policy of the machine mixed-mig sets how long turns on
// its T4 are. It holds from the first share to the last.
func TestIntervalOfShares(t *testing.T) {
	if demoMachine() != sharingMachine {
		t.Skip("the policy of this cluster sets no intervals")
	}
	ns := namespace(t)
	var uuid string
	for _, pod := range []string{"a", "b"} {
		apply(t, ns, claim(pod, `{deviceClassName: timeslice.partage.dev, selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].productName == 'Tesla T4'"}}]}`, "")+
			podUsing(pod, "resourceClaimName: "+pod))
		waitRunning(t, ns, pod)
		uuid = gpuUUID.FindString(waitLog(t, ns, pod, "main", "UUID: GPU-"))
		wantIntervals(t, uuid, "short")
	}
	deletePod(t, ns, "a")
	wantIntervals(t, uuid, "short")
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// TestSharesOfPartitions: pods that share a partition through MPS, as the policy of
// the machine mixed-mig offers it, and a partition of the same GPU that one pod has.
func TestSharesOfPartitions(t *testing.T) {
	if demoMachine() != sharingMachine {
		t.Skip("the policy of this cluster offers no shares of partitions")
	}
	ns := namespace(t)
	share := `{deviceClassName: mps.partage.dev, selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '2g.20gb'"}}]}`
	seen := map[string]bool{}
	for _, pod := range []string{"a", "b"} {
		apply(t, ns, claim(pod, share, "")+podDoing(pod, "nvidia-smi -L; "+holding("1Gi"), "resourceClaimName: "+pod))
		waitRunning(t, ns, pod)
		out := waitLog(t, ns, pod, "main", "ready")
		// Half of 20096 MiB less 512, and of 32 multiprocessors.
		wantAll(t, "pod "+pod, out, "MIG 2g.20gb", "limit 9792 MiB", "multiprocessors: 16 of 32 (50 %)", throughMPS)
		seen[migUUID.FindString(out)] = true
	}
	if len(seen) != 1 {
		t.Errorf("the pods see the partitions %v, want one", seen)
	}
	own := runningPartition(t, ns, "own")
	deletePod(t, ns, "a")
	wantSame(t, ns, "b")
	wantUndisturbed(t, ns, "own", own)
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}
