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

// processes returns the processes of a program that have a variable in their environment, or all of them when variable is "".
func processes(t *testing.T, program, variable string) []int {
	t.Helper()
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, path := range commands {
		// A process that ends in the meantime is not one of those sought.
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

// processOf returns the only process of an MPS program for a GPU.
func processOf(t *testing.T, program, uuid string) int {
	t.Helper()
	pids := processes(t, program, "CUDA_VISIBLE_DEVICES="+uuid)
	if len(pids) != 1 {
		t.Fatalf("GPU %s has the processes %v of %s, want one", uuid, pids, program)
	}
	return pids[0]
}

// taintsOf returns the keys of the taints of a GPU's device of a kind.
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

// waitTaint waits until a GPU's device of a kind has a taint, or no longer has it.
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

// waitLoss waits for the event that says that the clients of a claim lost their MPS server.
func waitLoss(t *testing.T, ns, claim string) {
	t.Helper()
	waitEvent(t, ns, claim, "MPSServerLost", "")
}

// wantFirstContainer fails the test unless the pod's container is ready and was never restarted.
func wantFirstContainer(t *testing.T, ns, pod string) {
	t.Helper()
	p, err := client.CoreV1().Pods(ns).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if s := p.Status.ContainerStatuses[0]; s.RestartCount != 0 || !s.Ready {
		t.Errorf("container of pod %s: ready %v, restarted %d times", pod, s.Ready, s.RestartCount)
	}
}

// wantClient fails the test unless the pod's first container still runs and is a client of MPS.
func wantClient(t *testing.T, ns, pod string) {
	t.Helper()
	wantFirstContainer(t, ns, pod)
	if out, err := inPod(ns, pod, "cuda-client", "info"); err != nil || !strings.Contains(out, throughMPS) {
		t.Errorf("pod %s: %v\n%s", pod, err, out)
	}
}

// waitBack waits until the kubelet has restarted a client that ended with its server, and it is a client again.
func waitBack(t *testing.T, ns, pod string) {
	t.Helper()
	waitRestarted(t, ns, pod)
	wantAll(t, "restarted pod "+pod, waitLog(t, ns, pod, "main", "ready"), throughMPS)
}

// TestMPSKilled checks that when the daemon or the server of a GPU ends, its claim gets an event, both come back, and other GPUs
// are not affected.
func TestMPSKilled(t *testing.T) {
	t.Parallel()
	for _, program := range []string{mpsDaemon, mpsServer} {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			ns, gpus := reserve(t, 2)
			uuid := runningClient(t, ns, "victim", mpsShare("10Gi", 25).on(gpus[0]))
			neighbour := runningClient(t, ns, "neighbour", mpsShare("10Gi", 25).on(gpus[1]))
			before, untouched := processOf(t, program, uuid), processOf(t, program, neighbour)

			if err := syscall.Kill(before, syscall.SIGKILL); err != nil {
				t.Fatalf("killing %s, process %d: %v", program, before, err)
			}
			waitLoss(t, ns, "victim")
			waitBack(t, ns, "victim")
			if now := processOf(t, program, uuid); now == before {
				t.Errorf("%s of GPU %s still is process %d", program, uuid, now)
			}
			wantClient(t, ns, "neighbour")
			if now := processOf(t, program, neighbour); now != untouched {
				t.Errorf("%s of GPU %s was process %d and is %d", program, neighbour, untouched, now)
			}
			deletePod(t, ns, "victim")
			waitTaint(t, uuid, "mps", unhealthy, false)
		})
	}
}

// TestFaultOfAClient checks that a fault of one client ends all clients of its GPU, that the device is tainted while the server takes
// no new ones, and that all is well once the faulty client has gone.
func TestFaultOfAClient(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 2)
	uuid := runningClient(t, ns, "victim", mpsShare("10Gi", 25).on(gpus[0]))
	runningClient(t, ns, "neighbour", mpsShare("10Gi", 25).on(gpus[1]))
	apply(t, ns, claim("culprit", mpsShare("10Gi", 25).on(gpus[0]), "")+
		podRunning("culprit", "cuda-client hold --fault-after 1ms --stay", "culprit"))
	waitLoss(t, ns, "victim")
	waitTaint(t, uuid, "mps", unhealthy, true)
	wantClient(t, ns, "neighbour")

	deletePod(t, ns, "culprit")
	waitTaint(t, uuid, "mps", unhealthy, false)
	waitBack(t, ns, "victim")
}

// TestNodeSupervisorKilled checks that the daemons of the node, which end with the supervisor, are started again, that the claims get
// an event, and that the pods come back by themselves.
func TestNodeSupervisorKilled(t *testing.T) {
	ns := reserveNode(t)
	uuid := runningClient(t, ns, "before", mpsShare("10Gi", 25))
	whole := runningWhole(t, ns)
	pids := processes(t, "mps-supervisor", "")
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
	wantDevice(t, ns, "whole", whole)
}

// TestNodeSupervisorReplaced checks the same when the supervisor's pod is deleted, as in an upgrade. Containers that were running have
// the old shared memory, so their claims get an event that asks for a restart.
func TestNodeSupervisorReplaced(t *testing.T) {
	ns := reserveNode(t)
	runningClient(t, ns, "before", mpsShare("10Gi", 25))
	replaceSupervisor(t)
	waitLoss(t, ns, "before")
	runningClient(t, ns, "after", mpsShare("10Gi", 25))
	deletePod(t, ns, "before")
	runningClient(t, ns, "again", mpsShare("10Gi", 25))
}

// replaceSupervisor deletes the supervisor's pod and waits until its successor is ready.
func replaceSupervisor(t *testing.T) {
	t.Helper()
	deletePod(t, driverNamespace, driverPod(t, supervisorComponent).Name)
	if out, err := exec.Command("kubectl", "wait", "-n", driverNamespace, "--for=condition=Ready", "--timeout="+waitLimit.String(), "pod",
		"--selector=app.kubernetes.io/component="+supervisorComponent).CombinedOutput(); err != nil {
		t.Fatalf("waiting for the new supervisor: %v\n%s", err, out)
	}
}

// runningWhole starts a pod with a whole GPU and returns the GPU's UUID.
func runningWhole(t *testing.T, ns string) string {
	t.Helper()
	apply(t, ns, claim("whole", wholeGPU, "")+podUsing("whole", "whole"))
	waitRunning(t, ns, "whole")
	return gpuUUID.FindString(waitLog(t, ns, "whole", "main", "UUID: GPU-"))
}

// TestNodeUpgradeKeepsMPS replaces the plugin while MPS clients run, and checks that their daemon stays and that the new plugin
// prepares and releases shares.
func TestNodeUpgradeKeepsMPS(t *testing.T) {
	ns := reserveNode(t)
	uuid := runningClient(t, ns, "before", mpsShare("10Gi", 25))
	daemon := processOf(t, mpsDaemon, uuid)
	if err := upgradePlugin(); err != nil {
		t.Fatal(err)
	}
	if now := runningClient(t, ns, "after", mpsShare("10Gi", 25)); now != uuid {
		t.Errorf("the second share is on GPU %s, want %s", now, uuid)
	}
	wantClient(t, ns, "before")
	deletePod(t, ns, "before")
	wantClient(t, ns, "after")
	if now := processOf(t, mpsDaemon, uuid); now != daemon {
		t.Errorf("the MPS daemon was process %d and is %d", daemon, now)
	}
	removePods(t, ns)
	checkNothingLeft(t)
	if pids := processes(t, mpsDaemon, ""); len(pids) > 0 {
		t.Errorf("the MPS daemons %v are still running", pids)
	}
}
