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

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// holding returns a command that prints the limits of a container and then holds memory of its GPU.
func holding(memory string) string {
	return "cuda-client info && exec cuda-client hold --memory " + memory
}

const throughMPS = "runs: as a client of an MPS server"

var gpuUUID = regexp.MustCompile(`GPU-[0-9a-f-]{36}`)

// runningClient starts a pod that is a client of MPS and returns the UUID of its GPU.
func runningClient(t *testing.T, ns, name string, r request) string {
	t.Helper()
	apply(t, ns, claim(name, r, "")+podRunning(name, holding("1Gi"), name))
	waitRunning(t, ns, name)
	out := waitLog(t, ns, name, "main", "ready")
	if !strings.Contains(out, throughMPS) {
		t.Errorf("pod %s is not a client of MPS:\n%s", name, out)
	}
	return gpuUUID.FindString(out)
}

// inPod runs a command in a pod's first container.
func inPod(ns, pod string, command ...string) (string, error) {
	out, err := exec.Command("kubectl", append([]string{"exec", "-n", ns, pod, "--"}, command...)...).CombinedOutput()
	return string(out), err
}

// deletePod deletes a pod and waits until it is gone.
func deletePod(t *testing.T, ns, name string) {
	t.Helper()
	if err := client.CoreV1().Pods(ns).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "pod "+name+" gone", func(ctx context.Context) (bool, string) {
		_, err := client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprintf("still there (%v)", err)
	})
}

// wantAll fails the test unless a text has all these parts.
func wantAll(t *testing.T, what, got string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(got, part) {
			t.Errorf("%s lacks %q:\n%s", what, part, got)
		}
	}
}

// TestSharesOfDifferentSize checks that claims on one GPU have the limits that they asked for. A program that drops its environment
// has the limits of the largest share, which are set on the server, and never none.
func TestSharesOfDifferentSize(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	apply(t, ns, claim("large", mpsShare("20Gi", 50).on(gpus...), "")+podRunning("large", holding("16Gi"), "large")+
		claim("small", mpsShare("10Gi", 25).on(gpus...), "")+podRunning("small", "cuda-client alloc 12Gi; "+holding("8Gi"), "small"))
	waitRunning(t, ns, "large")
	waitRunning(t, ns, "small")
	wantAll(t, "the large share", waitLog(t, ns, "large", "main", "ready"),
		"limit 20480 MiB", "(50 %)", throughMPS, "allocated 16384 MiB")
	wantAll(t, "the small share", waitLog(t, ns, "small", "main", "ready"),
		"limit 10240 MiB", "(25 %)", throughMPS, "out of memory (12288 MiB wanted)", "allocated 8192 MiB")

	withoutEnvironment := []string{"env", "-i", "/usr/bin/cuda-client", "info"}
	out, err := inPod(ns, "small", withoutEnvironment...)
	if err != nil {
		t.Fatalf("%v: %v\n%s", withoutEnvironment, err, out)
	}
	wantAll(t, "a program without environment", out, "limit 20480 MiB", "(50 %)", throughMPS)
	deletePod(t, ns, "large")
	eventually(t, "the server to have the small share's limits", func(context.Context) (bool, string) {
		out, err := inPod(ns, "small", withoutEnvironment...)
		return err == nil && strings.Contains(out, "limit 10240 MiB") && strings.Contains(out, "(25 %)"), out
	})
	wantFirstContainer(t, ns, "small")
}

// TestContainersWithAShareEach checks two containers of a pod, each with a claim on the same GPU.
func TestContainersWithAShareEach(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	apply(t, ns, claim("a", mpsShare("4Gi", 10).on(gpus...), "")+claim("b", mpsShare("6Gi", 20).on(gpus...), "")+
		pod("p", []container{{"a", holding("2Gi"), []string{"a"}}, {"b", holding("2Gi"), []string{"b"}}}))
	waitRunning(t, ns, "p")
	wantAll(t, "container a", waitLog(t, ns, "p", "a", "ready"), "limit 4096 MiB", "(10 %)", throughMPS)
	wantAll(t, "container b", waitLog(t, ns, "p", "b", "ready"), "limit 6144 MiB", "(20 %)", throughMPS)
}

// TestTwoSharesInOneContainer checks that a container with two shares does not start, and that an event of its pod says why: a process
// is a client of one daemon only, with the limits of one claim.
func TestTwoSharesInOneContainer(t *testing.T) {
	t.Parallel()
	for name, gpusOfPod := range map[string]int{"of one GPU": 1, "of two GPUs": 2} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns, gpus := reserve(t, gpusOfPod)
			apply(t, ns, claim("a", mpsShare("4Gi", 20).on(gpus[0]), "")+claim("b", mpsShare("4Gi", 20).on(gpus[gpusOfPod-1]), "")+
				pod("p", []container{{"main", "cuda-client info", []string{"a", "b"}}}))
			eventually(t, "an event that says that a container can have one share", func(ctx context.Context) (bool, string) {
				all := strings.Join(events(ctx, ns, "p"), " | ")
				return strings.Contains(all, "one MPS share only"), all
			})
			if out := containerLog(t, ns, "p"); strings.Contains(out, "device 0") {
				t.Errorf("the container ran:\n%s", out)
			}
		})
	}
}

// containerLog returns what the pod's container has printed, or nothing when it has never run.
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

// TestMPSOfOwnDevices checks that claims that have devices of their own set limits for their own processes, on the server, by device.
func TestMPSOfOwnDevices(t *testing.T) {
	t.Parallel()
	twoGPUs := wholeGPU
	twoGPUs.count = 2
	for name, tc := range map[string]struct {
		request      request
		kind, limits string
		want         []string
	}{
		"GPU": {
			wholeGPU, "GpuConfig", `defaultActiveThreadPercentage: 30, defaultPinnedDeviceMemoryLimit: 20Gi`,
			[]string{"device 0: NVIDIA", "limit 20480 MiB", "(30 %)"},
		},
		"two GPUs": {
			twoGPUs, "GpuConfig", `defaultPinnedDeviceMemoryLimit: 20Gi, defaultPerDevicePinnedMemoryLimit: {"1": 5Gi}`,
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
			t.Parallel()
			ns, gpus := reserve(t, max(1, tc.request.count))
			apply(t, ns, claim("c", tc.request.on(gpus...), mpsConfig(tc.kind, tc.limits))+
				podRunning("a", holding("1Gi"), "c")+podRunning("b", holding("1Gi"), "c"))
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
}

// TestInterval checks that a claim that has a GPU to itself chooses the time slice of that GPU only.
func TestInterval(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 2)
	apply(t, ns, claim("c", wholeGPU.on(gpus[0]), opaqueConfig("GpuConfig", "sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}"))+
		podUsing("p", "c"))
	waitRunning(t, ns, "p")
	wantTimeSlice(t, gpus[0].UUID, "long")
	wantTimeSlice(t, gpus[1].UUID, "default")
}

// wantTimeSlice fails the test unless a GPU has this time slice.
func wantTimeSlice(t *testing.T, uuid, interval string) {
	t.Helper()
	for _, g := range showMachine(t).GPUs {
		if g.UUID == uuid {
			if g.TimeSlice != interval {
				t.Errorf("GPU %s has time slice %s, want %s", g.PCIAddress, g.TimeSlice, interval)
			}
			return
		}
	}
	t.Errorf("the machine has no GPU %s", uuid)
}

const sharingMachine = "mixed-mig"

// TestIntervalOfShares checks that the time slice that the policy of machine mixed-mig sets for its T4 holds from the first share to
// the last.
func TestIntervalOfShares(t *testing.T) {
	if demoMachine() != sharingMachine {
		t.Skip("the policy of this cluster sets no intervals")
	}
	ns := reserveNode(t)
	var uuid string
	share := request{class: "timeslice.partage.dev"}.where("device.attributes['gpu.nvidia.com'].productName == 'Tesla T4'")
	for _, pod := range []string{"a", "b"} {
		apply(t, ns, claim(pod, share, "")+podUsing(pod, pod))
		waitRunning(t, ns, pod)
		uuid = gpuUUID.FindString(waitLog(t, ns, pod, "main", "UUID: GPU-"))
		wantTimeSlice(t, uuid, "short")
	}
	deletePod(t, ns, "a")
	wantTimeSlice(t, uuid, "short")
}

// TestSharesOfPartitions checks pods that share a partition through MPS, as the policy of machine mixed-mig offers it, beside a
// partition of the same GPU that one pod has to itself.
func TestSharesOfPartitions(t *testing.T) {
	if demoMachine() != sharingMachine {
		t.Skip("the policy of this cluster offers no shares of partitions")
	}
	ns := reserveNode(t)
	share := request{class: "mps.partage.dev"}.where("device.attributes['gpu.nvidia.com'].profile == '2g.20gb'")
	seen := map[string]bool{}
	for _, pod := range []string{"a", "b"} {
		apply(t, ns, claim(pod, share, "")+podRunning(pod, "nvidia-smi -L; "+holding("1Gi"), pod))
		waitRunning(t, ns, pod)
		out := waitLog(t, ns, pod, "main", "ready")
		// Half of 20096 MiB less 512, and of 32 multiprocessors.
		wantAll(t, "pod "+pod, out, "MIG 2g.20gb", "limit 9588 MiB", "multiprocessors: 16 of 32 (50 %)", throughMPS)
		seen[migUUID.FindString(out)] = true
	}
	if len(seen) != 1 {
		t.Errorf("the pods see the partitions %v, want one", seen)
	}
	own := runningPartition(t, ns, "own")
	deletePod(t, ns, "a")
	wantClient(t, ns, "b")
	wantDevice(t, ns, "own", own)
}
