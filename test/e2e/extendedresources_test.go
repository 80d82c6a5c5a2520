//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// podAsking returns a pod as for a device plugin: with a resource, on nodes with labels, and without a claim.
func podAsking(name, resource string, count int, selector string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {%s}
  containers:
  - {name: main, image: %s, imagePullPolicy: Never, command: [sh, -c, '%s'], resources: {limits: {%s: %d}}}
---`, name, selector, demoImage, listAndStay, resource, count)
}

// TestResourcesOfMIGProfiles checks that pods get partitions by the names of NVIDIA's device plugin, of which no value lists one.
func TestResourcesOfMIGProfiles(t *testing.T) {
	ns := reserveNode(t)
	apply(t, ns, podAsking("small", "nvidia.com/mig-1g.10gb", 1, "")+podAsking("large", "nvidia.com/mig-3g.40gb", 2, ""))
	for pod, want := range map[string]string{"small": "MIG 1g.10gb", "large": "MIG 3g.40gb"} {
		waitRunning(t, ns, pod)
		waitLog(t, ns, pod, "main", want)
	}
	if out := logs(t, ns, "large", "main"); strings.Count(out, "MIG 3g.40gb") != 2 {
		t.Errorf("the pod has not two partitions:\n%s", out)
	}
}

// TestNodeLabels checks that the plugin writes labels of its node where it is told to, so that a manifest for GPU feature discovery and
// the device plugin runs; that it leaves labels of others alone, and removes its own.
func TestNodeLabels(t *testing.T) {
	ns := reserveNode(t)
	node := driverPod(t, pluginComponent).Spec.NodeName
	setMode := func(mode string) {
		mustHelm(t, "upgrade", release, filepath.Join(repoRoot, "deployments", "helm", "partage"), "--reset-then-reuse-values",
			"--set", "kubeletPlugin.nodeLabels="+mode, "--wait=legacy", "--timeout", waitLimit.String())
	}
	t.Cleanup(func() { setMode("Never") })
	untilLabels := func(what string, want map[string]string) {
		t.Helper()
		eventually(t, what, func(ctx context.Context) (bool, string) {
			n, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
			if err != nil {
				return false, err.Error()
			}
			got := maps.Clone(n.Labels)
			maps.DeleteFunc(got, func(key, _ string) bool { return !strings.HasPrefix(key, "nvidia.com/") })
			diff := cmp.Diff(want, got)
			return diff == "", diff
		})
	}
	kubectl := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("kubectl", args...).CombinedOutput(); err != nil {
			t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}

	kubectl("label", "node", node, "nvidia.com/gpu.family=of-somebody-else")
	setMode("Write")
	want := map[string]string{
		"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": fmt.Sprint(pool.total), "nvidia.com/gpu.memory": "81559",
		"nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0", "nvidia.com/gpu.family": "of-somebody-else",
	}
	untilLabels("labels", want)
	eventually(t, "an event about the label of somebody else", func(ctx context.Context) (bool, string) {
		all := strings.Join(events(ctx, "default", node), " | ")
		return strings.Contains(all, "nvidia.com/gpu.family=of-somebody-else of kubectl-label instead of hopper"), all
	})
	apply(t, ns, podAsking("old", "nvidia.com/gpu", 1, "nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3"))
	waitRunning(t, ns, "old")
	waitLog(t, ns, "old", "main", "NVIDIA H100 80GB HBM3")

	setMode("Remove")
	untilLabels("only the label of somebody else", map[string]string{"nvidia.com/gpu.family": "of-somebody-else"})
	kubectl("label", "node", node, "nvidia.com/gpu.family-")
}
