//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestNeighboursSuites applies manifests of the suites of NVIDIA's DRA driver, unmodified, and looks at what those suites look at: that the
// pods become ready, and how many devices their containers see.
func TestNeighboursSuites(t *testing.T) {
	if suite != neighboursSuite {
		t.Skip("needs the sources of suite " + neighboursSuite)
	}
	ns := reserveNode(t)
	manifests := []struct {
		file    string
		devices int
	}{
		{"gpu-simple-full", 1},
		{"gpu-1pod-2cnt-1gpu", 1},
		{"gpu-2pods-1gpu", 1},
		{"gpu-2pods-2gpus", 2},
		{"gpu-two-claims-one-pod", 2},
		{"gpu-timeslicing", 1},
		{"gpu-mps", 1},
		{"gpu-anymig", 1},
		{"gpu-simple-mig", 1},
		{"gpu-simple-mig-ts", 1},
		{"gpu-multiple-mig", 2},
	}
	for _, test := range manifests {
		file := filepath.Join(repoRoot, neighboursDir, "src/dra-driver-nvidia-gpu/tests/bats/specs", test.file+".yaml")
		kubectl(t, "apply", "--namespace", ns, "--filename", file)
		kubectl(t, "wait", "--namespace", ns, "--for", "condition=Ready", "pods", "--all", "--timeout", waitLimit.String())
		out, err := exec.CommandContext(t.Context(), "kubectl", "logs", "--namespace", ns, "--selector", "env=batssuite", "--all-containers").Output()
		if err != nil {
			t.Fatalf("logs of %s: %v", test.file, err)
		}
		seen := migUUID.FindAllString(string(out), -1)
		if strings.Contains(test.file, "mig") == (len(seen) == 0) {
			t.Errorf("%s: containers see\n%s", test.file, out)
		}
		if len(seen) == 0 {
			seen = gpuUUID.FindAllString(string(out), -1)
		}
		slices.Sort(seen)
		if seen = slices.Compact(seen); len(seen) != test.devices {
			t.Errorf("%s: containers see the devices %q, want %d", test.file, seen, test.devices)
		}
		removePods(t, ns)
		kubectl(t, "delete", "--namespace", ns, "--filename", file, "--ignore-not-found")
		untilDeallocated(t, ns)
	}
	record(t, "NVIDIA DRA driver, manifests of its suites", fmt.Sprintf("%d of them run as they are: whole GPUs, time-slicing, MPS and partitions", len(manifests)))
}

// TestNeighboursKubeRay lets KubeRay's operator, unmodified, make pods of the cluster in docs/examples/ray. Ray itself does not run: what
// the images have of it prints the devices and stays.
func TestNeighboursKubeRay(t *testing.T) {
	if suite != neighboursSuite {
		t.Skip("needs the programs of suite " + neighboursSuite)
	}
	ns := reserveNode(t)
	kubectl(t, "apply", "--server-side", "--filename", filepath.Join(repoRoot, neighboursDir, "kuberay-crds"))
	kubectl(t, "wait", "--for", "condition=Established", "crd/rayclusters.ray.io", "crd/rayjobs.ray.io", "crd/rayservices.ray.io")
	operator := exec.CommandContext(t.Context(), filepath.Join(repoRoot, neighboursDir, "kuberay"),
		"--enable-leader-election=false", "--watch-namespace="+ns, "--metrics-addr=0", "--health-probe-bind-address=0")
	var log bytes.Buffer
	operator.Stdout, operator.Stderr = &log, &log
	if err := operator.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = operator.Wait()
		if t.Failed() {
			t.Logf("log of KubeRay:\n%s", &log)
		}
	})
	example, err := os.ReadFile(filepath.Join(repoRoot, "docs/examples/ray/raycluster.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	// The node is smaller than those that the example is for.
	apply(t, ns, regexp.MustCompile(`\{cpu: "[0-9]+", memory: [0-9]+Gi\}`).ReplaceAllString(string(example), "{cpu: 50m, memory: 64Mi}"))
	workers := func(want int) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d workers with a partition each", want), func(ctx context.Context) (bool, string) {
			pods, err := client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "ray.io/node-type=worker"})
			if err != nil {
				return false, err.Error()
			}
			seen := map[string]bool{}
			var said []string
			for _, p := range pods.Items {
				out, _ := tryLogs(ctx, ns, p.Name, "ray-worker")
				for _, uuid := range migUUID.FindAllString(out, -1) {
					seen[uuid] = true
				}
				said = append(said, out, strings.Join(events(ctx, ns, p.Name), " | "))
			}
			return len(pods.Items) == want && len(seen) == want, strings.Join(said, "\n")
		})
	}
	workers(1)
	kubectl(t, "patch", "raycluster", "ray", "--namespace", ns, "--type", "json", "--patch",
		`[{"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": 2}]`)
	workers(2)
	kubectl(t, "delete", "raycluster", "ray", "--namespace", ns)
	removePods(t, ns)
	untilDeallocated(t, ns)
	record(t, "KubeRay", "its operator makes the pods of the example, with a partition for each worker")
}
