// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
)

// labelsOf are the labels that GPU feature discovery gives to a node with GPUs of one model.
func labelsOf(t *testing.T, node *gpu.Node) map[string]string {
	t.Helper()
	g := node.GPUs[0]
	var driver [3]int
	if n, _ := fmt.Sscanf(node.DriverVersion, "%d.%d.%d", &driver[0], &driver[1], &driver[2]); n < 2 {
		t.Fatalf("driver version %q", node.DriverVersion)
	}
	return map[string]string{
		"nvidia.com/gpu.product":                strings.Join(strings.Fields(g.ProductName), "-"),
		"nvidia.com/gpu.memory":                 fmt.Sprint(g.Resources.MemoryBytes >> 20),
		"nvidia.com/gpu.family":                 strings.ToLower(strings.ReplaceAll(g.Architecture, " ", "-")),
		"nvidia.com/gpu.compute.major":          fmt.Sprint(g.ComputeCapability.Major),
		"nvidia.com/gpu.compute.minor":          fmt.Sprint(g.ComputeCapability.Minor),
		"nvidia.com/cuda.driver-version.full":   node.DriverVersion,
		"nvidia.com/cuda.driver-version.major":  fmt.Sprint(driver[0]),
		"nvidia.com/cuda.runtime-version.major": fmt.Sprint(node.CUDAVersion.Major),
		"nvidia.com/cuda.runtime-version.minor": fmt.Sprint(node.CUDAVersion.Minor),
	}
}

// TestLabels: for every board and every label that it has, a pod that selects the label gets a
// GPU of every board that has the same label, and of no other one. That holds for a node
// selector, and for an affinity the other way round.
func TestLabels(t *testing.T) {
	names := boards.Names()
	if len(names) < 13 {
		t.Fatalf("%d boards", len(names))
	}
	all := map[string]map[string]string{}
	for _, board := range names {
		all[board] = labelsOf(t, loadNode(t, board))
	}
	const policyFile = "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\ndefault: {kinds: [gpu]}\n"
	gets := func(spec resourceapi.ResourceClaimSpec, board string) bool {
		return len(newCluster(t, []byte(policyFile), board).allocate(t, *spec.DeepCopy())) == 1
	}
	tried := map[[2]string]bool{}
	compared := 0
	for _, own := range all {
		for key, value := range own {
			if tried[[2]string{key, value}] {
				continue
			}
			tried[[2]string{key, value}] = true
			selector := claimOf(t, fmt.Sprintf("nodeSelector: {%s: %q}", key, value))
			others := claimOf(t, fmt.Sprintf("affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: %s, operator: NotIn, values: [%q]}]}]}}}", key, value))
			for _, board := range slices.Sorted(maps.Keys(all)) {
				want := all[board][key] == value
				if got := gets(selector, board); got != want {
					t.Errorf("%s: %s: %s, which has %s, is allocated: %t", key, value, board, all[board][key], got)
				}
				if got := gets(others, board); got == want {
					t.Errorf("%s not in %s: %s, which has %s, is allocated: %t", key, value, board, all[board][key], got)
				}
				compared++
			}
		}
	}
	if compared < 13*40 {
		t.Errorf("only %d comparisons", compared)
	}
}

// claimOf is the claim of a pod with something in its spec that chooses nodes.
func claimOf(t *testing.T, field string) resourceapi.ResourceClaimSpec {
	t.Helper()
	pod := "apiVersion: v1\nkind: Pod\nmetadata: {name: one}\nspec:\n  " + field + "\n" +
		"  containers: [{name: main, image: registry.example.com/main, resources: {limits: {nvidia.com/gpu: 1}}}]\n"
	out, stderr, err := run(t, pod, "pods", "-")
	if err != nil || strings.Contains(stderr, "not translated") {
		t.Fatalf("%s: %v\n%s", field, err, stderr)
	}
	if strings.Contains(out, "\n  nodeSelector:") || strings.Contains(out, "affinity:") {
		t.Errorf("%s is still there:\n%s", field, out)
	}
	return decodeAs[resourceapi.ResourceClaimTemplate](t, documents(t, []byte(out))[0], "ResourceClaimTemplate").Spec.Spec
}

// TestLabelBounds: Gt and Lt compare numbers, and alternatives stay alternatives.
func TestLabelBounds(t *testing.T) {
	const policyFile = "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\ndefault: {kinds: [gpu]}\n"
	terms := func(terms string) string {
		return "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [" + terms + "]}}}"
	}
	for field, want := range map[string]string{
		terms("{matchExpressions: [{key: nvidia.com/gpu.memory, operator: Gt, values: ['20000']}, {key: nvidia.com/gpu.memory, operator: Lt, values: ['30000']}]}"): "l4",
		terms("{matchExpressions: [{key: nvidia.com/gpu.compute.major, operator: Gt, values: ['8']}]}"):                                                             "h100-80-sxm",
		terms("{matchExpressions: [{key: nvidia.com/gpu.compute.major, operator: Lt, values: ['8']}]}"):                                                             "t4",
		terms("{matchExpressions: [{key: nvidia.com/gpu.product, operator: In, values: [Tesla-T4, NVIDIA-L4]}]}"):                                                   "l4 t4",
		terms("{matchExpressions: [{key: nvidia.com/gpu.product, operator: In, values: [TESLA-T4, L4]}]}"):                                                          "l4 t4",
		terms("{matchExpressions: [{key: nvidia.com/gpu.product, operator: Exists}]}"):                                                                              "a100-80 h100-80-sxm l4 t4",
		"nodeSelector: {nvidia.com/gpu.count: '1'}":                                                                                                                 "a100-80 h100-80-sxm l4 t4",
		"nodeSelector: {nvidia.com/mig-1g.10gb.count: '7'}":                                                                                                         "a100-80 h100-80-sxm l4 t4",
		"nodeSelector: {nvidia.com/gpu.sharing-strategy: none}":                                                                                                     "a100-80 h100-80-sxm l4 t4",
	} {
		spec := claimOf(t, field)
		var got []string
		for _, board := range []string{"a100-80", "h100-80-sxm", "l4", "t4"} {
			if len(newCluster(t, []byte(policyFile), board).allocate(t, *spec.DeepCopy())) == 1 {
				got = append(got, board)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s:\ngot  %v\nwant %s", field, got, want)
		}
	}
}
