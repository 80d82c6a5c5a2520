//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/templates"
)

// templateCount is how many files the folder templates has.
const templateCount = 16

// podsOfTemplates is how many pods each template with pods makes.
var podsOfTemplates = map[string]int{
	"ci.yaml": 1, "inference-small-models.yaml": 2, "inference.yaml": 1, "mpi.yaml": 4, "mps-share.yaml": 1, "notebook.yaml": 2,
	"partition-by-memory.yaml": 1, "partition-by-profile.yaml": 1, "several-pods-one-claim.yaml": 2, "time-slice-share.yaml": 1,
	"training.yaml": 1, "whole-gpu.yaml": 1, "without-a-claim.yaml": 2,
}

// TestTemplates applies every file of templates as it is, all at once in namespaces of their own that enforce the Pod Security Standard
// "restricted", and waits until each pod is ready or has ended well, with a GPU in view. The API server takes the values for helm as part
// of the chart.
func TestTemplates(t *testing.T) {
	reserveNode(t)
	names, err := templates.Names()
	if err != nil || len(names) != templateCount {
		t.Fatalf("there are %d templates, want %d (%v)", len(names), templateCount, err)
	}
	namespaces := map[string]string{}
	for _, name := range names {
		path := filepath.Join(repoRoot, "templates", name)
		if templates.IsValues(name) {
			checkValues(t, path)
			continue
		}
		ns := makeNamespace(t)
		namespaces[name] = ns
		restrict(t, ns)
		t.Cleanup(func() {
			// Before the pods: what makes them would make them again.
			deleteFile(t, ns, path)
			removeNamespace(t, ns)
		})
		if out, err := exec.CommandContext(t.Context(), "kubectl", "apply", "-n", ns, "-f", path).CombinedOutput(); err != nil {
			t.Fatalf("kubectl apply -f %s: %v\n%s", name, err, out)
		}
	}
	ran := 0
	for name, want := range podsOfTemplates {
		for _, p := range waitTemplatePods(t, name, namespaces[name], want) {
			waitLog(t, namespaces[name], p, "main", "GPU 0: NVIDIA H100 80GB HBM3")
		}
		ran++
	}
	// device-classes.yaml and quota.yaml have no pods, and the values for helm are no manifest.
	if ran+3 != templateCount {
		t.Errorf("%d templates ran, there are %d", ran, templateCount)
	}
	checkQuota(t, namespaces["quota.yaml"])
}

// restrict has a namespace enforce what tenants are advised to.
func restrict(t *testing.T, ns string) {
	t.Helper()
	label := []byte(`{"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}`)
	if _, err := client.CoreV1().Namespaces().Patch(t.Context(), ns, types.MergePatchType, label, metav1.PatchOptions{}); err != nil {
		t.Fatalf("labelling namespace %s: %v", ns, err)
	}
}

func deleteFile(t *testing.T, ns, path string) {
	t.Helper()
	out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "kubectl", "delete", "-n", ns, "-f", path, "--ignore-not-found",
		"--timeout="+waitLimit.String()).CombinedOutput()
	if err != nil {
		t.Errorf("kubectl delete -f %s: %v\n%s", path, err, out)
	}
}

// waitTemplatePods waits until a namespace has so many pods, each ready or at its good end, and returns their names.
func waitTemplatePods(t *testing.T, template, ns string, want int) []string {
	t.Helper()
	var names []string
	eventually(t, fmt.Sprintf("%d pods of %s", want, template), func(ctx context.Context) (bool, string) {
		list, err := client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		names = nil
		var seen []string
		for _, p := range list.Items {
			if readyOrDone(&p) {
				names = append(names, p.Name)
				continue
			}
			seen = append(seen, fmt.Sprintf("%s %s: %s", p.Name, p.Status.Phase, strings.Join(events(ctx, ns, p.Name), " | ")))
		}
		return len(names) == want && len(list.Items) == want, fmt.Sprintf("%d of %d pods; %s", len(names), len(list.Items), strings.Join(seen, "; "))
	})
	return names
}

func readyOrDone(p *corev1.Pod) bool {
	if p.Status.Phase == corev1.PodSucceeded {
		return true
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return true
		}
	}
	return false
}

// checkValues installs nothing: it lets helm make the chart's objects with the values, and the API server check them.
func checkValues(t *testing.T, path string) {
	t.Helper()
	script := fmt.Sprintf("helm template partage deployments/helm/partage --namespace %s --no-hooks --values demo/values-simulated.yaml --values '%s' |"+
		" kubectl apply --namespace %s --dry-run=server -f -", driverNamespace, path, driverNamespace)
	cmd := exec.CommandContext(t.Context(), "bash", "-c", "set -o pipefail; "+script)
	cmd.Dir = repoRoot
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%s: %v\n%s", script, err, out)
	}
}

// checkQuota: the quota counts, and refuses what is beyond it.
func checkQuota(t *testing.T, ns string) {
	t.Helper()
	eventually(t, "the quota to be counted", func(ctx context.Context) (bool, string) {
		q, err := client.CoreV1().ResourceQuotas(ns).Get(ctx, "gpus", metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		return len(q.Status.Used) == len(q.Spec.Hard), fmt.Sprintf("used %v", q.Status.Used)
	})
	cmd := exec.CommandContext(t.Context(), "kubectl", "apply", "-n", ns, "-f", "-")
	cmd.Stdin = strings.NewReader(claim("too-many", request{class: "gpu.nvidia.com"}.times(3), ""))
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "exceeded quota") {
		t.Errorf("a claim for 3 GPUs with a quota of 2: %v\n%s", err, out)
	}
}
