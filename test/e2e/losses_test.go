//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	mpsDaemon = "nvidia-cuda-mps-control"
	mpsServer = "nvidia-cuda-mps-server"
	unhealthy = driverName + "/mps-unhealthy"
)

// running finds the processes of a program that have a variable in their
// environment, which may be "".
func running(t *testing.T, program, variable string) []int {
	t.Helper()
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, path := range commands {
		// A process that ends meanwhile is none of those that are looked for.
		line, _ := os.ReadFile(path)
		name, _, _ := strings.Cut(string(line), "\x00")
		if filepath.Base(name) != program {
			continue
		}
		environment, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "environ"))
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil &&
			(variable == "" || slices.Contains(strings.Split(string(environment), "\x00"), variable)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// processOf is the one process of a program of MPS for a GPU.
func processOf(t *testing.T, program, uuid string) int {
	t.Helper()
	pids := running(t, program, "CUDA_VISIBLE_DEVICES="+uuid)
	if len(pids) != 1 {
		t.Fatalf("GPU %s has the processes %v of %s, want one", uuid, pids, program)
	}
	return pids[0]
}

// taintsOf are the keys of the taints of a GPU's share device.
func taintsOf(ctx context.Context, uuid, kind string) ([]string, error) {
	published, err := publishedSlices(ctx)
	if err != nil {
		return nil, err
	}
	for _, s := range published {
		for _, d := range s.Spec.Devices {
			if *d.Attributes["type"].StringValue != kind || *d.Attributes["parentUUID"].StringValue != uuid || *d.Attributes["profile"].StringValue != "" {
				continue
			}
			var keys []string
			for _, taint := range d.Taints {
				keys = append(keys, taint.Key)
			}
			return keys, nil
		}
	}
	return nil, fmt.Errorf("no device of type %s on GPU %s", kind, uuid)
}

func waitTaint(t *testing.T, uuid, kind, key string, want bool) {
	t.Helper()
	eventually(t, fmt.Sprintf("taint %s on the %s device of GPU %s: %v", key, kind, uuid, want), func(ctx context.Context) (bool, string) {
		keys, err := taintsOf(ctx, uuid, kind)
		if err != nil {
			return false, err.Error()
		}
		return slices.Contains(keys, key) == want, fmt.Sprint(keys)
	})
}

// waitLoss waits for the claim to be told that its clients lost their server.
func waitLoss(t *testing.T, ns, claim string) {
	t.Helper()
	eventually(t, "an event of claim "+claim+" about the MPS server", func(ctx context.Context) (bool, string) {
		all := events(ctx, ns, claim)
		return slices.ContainsFunc(all, func(e string) bool { return strings.HasPrefix(e, "MPSServerLost: ") }), strings.Join(all, " | ")
	})
}

// wantSame fails unless the pod's container still is the first one and works.
func wantSame(t *testing.T, ns, pod string) {
	t.Helper()
	p, err := client.CoreV1().Pods(ns).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if s := p.Status.ContainerStatuses[0]; s.RestartCount != 0 || !s.Ready {
		t.Errorf("container of pod %s: ready %v, started again %d times", pod, s.Ready, s.RestartCount)
	}
	if out, err := inPod(ns, pod, "cuda-client", "info"); err != nil || !strings.Contains(out, throughMPS) {
		t.Errorf("pod %s: %v\n%s", pod, err, out)
	}
}

// waitBack waits for a client that ended with its server to be started again by the
// kubelet and to be a client again.
func waitBack(t *testing.T, ns, pod string) {
	t.Helper()
	waitRestarted(t, ns, pod)
	wantAll(t, "pod "+pod+", started again", waitLog(t, ns, pod, "main", "ready"), throughMPS)
}

// TestMPSKilled: when the daemon or the server of a GPU ends, the claim is told, both
// come back, and other GPUs do not notice.
func TestMPSKilled(t *testing.T) {
	for _, program := range []string{mpsDaemon, mpsServer} {
		t.Run(program, func(t *testing.T) {
			ns := namespace(t)
			uuid := runningClient(t, ns, "victim", mpsShare("10Gi", 25))
			neighbour := runningClient(t, ns, "neighbour", elsewhere(mpsShare("10Gi", 25), uuid))
			before, untouched := processOf(t, program, uuid), processOf(t, program, neighbour)

			if err := syscall.Kill(before, syscall.SIGKILL); err != nil {
				t.Fatalf("killing %s, process %d: %v", program, before, err)
			}
			waitLoss(t, ns, "victim")
			waitBack(t, ns, "victim")
			if now := processOf(t, program, uuid); now == before {
				t.Errorf("%s of GPU %s still is %d", program, uuid, now)
			}
			wantSame(t, ns, "neighbour")
			if now := processOf(t, program, neighbour); now != untouched {
				t.Errorf("%s of GPU %s was %d and is %d", program, neighbour, untouched, now)
			}
			deletePod(t, ns, "victim")
			waitTaint(t, uuid, "mps", unhealthy, false)
			deleteNamespace(t, ns)
			checkNothingLeft(t)
		})
	}
}

// TestFaultOfAClient: it ends all clients of the GPU, the device is tainted as long
// as the server takes no new ones, and all is well when they have gone.
func TestFaultOfAClient(t *testing.T) {
	ns := namespace(t)
	uuid := runningClient(t, ns, "victim", mpsShare("10Gi", 25))
	neighbour := runningClient(t, ns, "neighbour", elsewhere(mpsShare("10Gi", 25), uuid))
	if neighbour == uuid {
		t.Fatalf("both pods are on GPU %s", uuid)
	}
	apply(t, ns, claim("culprit", mpsShare("10Gi", 25), "")+
		podDoing("culprit", "cuda-client hold --fault-after 1ms --stay", "resourceClaimName: culprit"))
	waitLoss(t, ns, "victim")
	waitTaint(t, uuid, "mps", unhealthy, true)
	wantSame(t, ns, "neighbour")

	deletePod(t, ns, "culprit")
	waitTaint(t, uuid, "mps", unhealthy, false)
	waitBack(t, ns, "victim")
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// TestSupervisorKilled: with it all daemons of the node end. They are started again,
// the claims are told, and the pods come back by themselves.
func TestSupervisorKilled(t *testing.T) {
	ns := namespace(t)
	uuid := runningClient(t, ns, "before", mpsShare("10Gi", 25))
	whole := runningWhole(t, ns)
	pids := running(t, "mps-supervisor", "")
	if len(pids) != 1 {
		t.Fatalf("the supervisor's processes are %v, want one", pids)
	}
	if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
		t.Fatalf("killing the MPS supervisor: %v", err)
	}
	waitLoss(t, ns, "before")
	waitBack(t, ns, "before")
	waitTaint(t, uuid, "mps", unhealthy, false)
	runningClient(t, ns, "after", mpsShare("10Gi", 25))
	wantUndisturbed(t, ns, "whole", whole)
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// TestSupervisorReplaced: the same when its pod is deleted, as an upgrade does.
// Containers that ran have the old shared memory and are told to be restarted.
func TestSupervisorReplaced(t *testing.T) {
	ns := namespace(t)
	runningClient(t, ns, "before", mpsShare("10Gi", 25))
	replaceSupervisor(t)
	waitLoss(t, ns, "before")
	runningClient(t, ns, "after", mpsShare("10Gi", 25))
	deletePod(t, ns, "before")
	runningClient(t, ns, "again", mpsShare("10Gi", 25))
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

func replaceSupervisor(t *testing.T) {
	t.Helper()
	old := driverPod(t, supervisorComponent)
	deletePod(t, driverNamespace, old.Name)
	if out, err := exec.Command("kubectl", "wait", "-n", driverNamespace, "--for=condition=Ready", "--timeout=60s", "pod",
		"--selector=app.kubernetes.io/component="+supervisorComponent).CombinedOutput(); err != nil {
		t.Fatalf("waiting for the new supervisor: %v\n%s", err, out)
	}
}

// runningWhole starts a pod with a whole GPU and returns the GPU's UUID.
func runningWhole(t *testing.T, ns string) string {
	t.Helper()
	apply(t, ns, claim("whole", wholeGPU, "")+podUsing("whole", "resourceClaimName: whole"))
	waitRunning(t, ns, "whole")
	return gpuUUID.FindString(waitLog(t, ns, "whole", "main", "UUID: GPU-"))
}

// TestUpgradeLeavesMPSAlone: the plugin is replaced while clients of MPS run. Their
// daemon stays, and shares are prepared and released by the new one.
func TestUpgradeLeavesMPSAlone(t *testing.T) {
	ns := namespace(t)
	uuid := runningClient(t, ns, "before", mpsShare("10Gi", 25))
	daemon := processOf(t, mpsDaemon, uuid)
	const daemonSet = "daemonset/partage-gpu-kubelet-plugin"
	out, err := exec.Command("sh", "-c", fmt.Sprintf("kubectl -n %[1]s rollout restart %[2]s && kubectl -n %[1]s rollout status %[2]s --timeout=90s",
		driverNamespace, daemonSet)).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if now := runningClient(t, ns, "after", mpsShare("10Gi", 25)); now != uuid {
		t.Errorf("the second share is on GPU %s, want %s", now, uuid)
	}
	wantSame(t, ns, "before")
	deletePod(t, ns, "before")
	wantSame(t, ns, "after")
	if now := processOf(t, mpsDaemon, uuid); now != daemon {
		t.Errorf("the MPS daemon was %d and is %d", daemon, now)
	}
	deleteNamespace(t, ns)
	checkNothingLeft(t)
	if pids := running(t, mpsDaemon, ""); len(pids) > 0 {
		t.Errorf("the MPS daemons %v run on", pids)
	}
}
