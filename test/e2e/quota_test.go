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
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// quotaPage is docs/how-to/quota.md. Its blocks of code are what the test applies and sees.
func quotaPage(t *testing.T) (page string, manifests []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repoRoot, "docs", "how-to", "quota.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, found := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		manifests = append(manifests, found[1])
	}
	return string(text), manifests
}

// TestQuota follows docs/how-to/quota.md: what each number counts, and what is said to those who ask for more.
func TestQuota(t *testing.T) {
	page, manifests := quotaPage(t)
	if len(manifests) != 2 {
		t.Fatalf("the page has %d manifests", len(manifests))
	}
	ns := reserveNode(t)
	said := 0
	mustSay := func(text string) {
		t.Helper()
		said++
		if !strings.Contains(page, "\n"+text+"\n") {
			t.Errorf("the page lacks\n%s", text)
		}
	}
	refused := func(manifest string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "kubectl", "create", "-n", ns, "-f", "-")
		cmd.Stdin = strings.NewReader(manifest)
		out, err := cmd.CombinedOutput()
		if err == nil {
			t.Fatalf("not refused:\n%s", manifest)
		}
		_, text, _ := strings.Cut(strings.TrimSpace(string(out)), `error when creating "STDIN": `)
		mustSay(text)
	}
	used := func(want map[string]string) {
		t.Helper()
		eventually(t, "quota", func(ctx context.Context) (bool, string) {
			q, err := client.CoreV1().ResourceQuotas(ns).Get(ctx, "gpus", metav1.GetOptions{})
			if err != nil {
				return false, err.Error()
			}
			for name, value := range want {
				if got := q.Status.Used[corev1.ResourceName(name)]; got.String() != value {
					return false, fmt.Sprintf("%s is %s, want %s; all: %v", name, got.String(), value, q.Status.Used)
				}
			}
			return true, ""
		})
	}
	const byClass, byResource = "gpu.nvidia.com.deviceclass.resource.k8s.io/devices", "requests.nvidia.com/gpu"
	apply(t, ns, manifests[0])
	used(map[string]string{byClass: "0", byResource: "0"})

	// A claim counts for both names.
	refused(claim("three-gpus", request{class: "gpu.nvidia.com", count: 3}, ""))
	apply(t, ns, claim("one-gpu", request{class: "gpu.nvidia.com"}, ""))
	used(map[string]string{byClass: "1", byResource: "1"})
	// A pod with a resource is judged before it is scheduled, and counts once when it has its claim.
	refused(podAsking("two-more", "nvidia.com/gpu", 2, ""))
	apply(t, ns, podAsking("one-more", "nvidia.com/gpu", 1, ""))
	waitRunning(t, ns, "one-more")
	used(map[string]string{byClass: "2", byResource: "2", "count/resourceclaims.resource.k8s.io": "2"})

	// The resource of a profile limits claims of its class, too.
	refused(podAsking("two-partitions", "nvidia.com/mig-1g.10gb", 2, ""))
	refused(claim("two-partitions", request{class: "mig-1g.10gb.nvidia.com", count: 2}, ""))
	// Shares count as devices, whatever memory they ask for.
	refused(claim("three-shares", request{class: "mps.partage.dev", count: 3}, ""))
	apply(t, ns, claim("large-share", mpsShare("70Gi", 100), ""))
	used(map[string]string{"mps.partage.dev.deviceclass.resource.k8s.io/devices": "1"})
	// Without a number for the resource, the pod is taken, and its claim refused later.
	refused(podAsking("three-shares", "deviceclass.resource.kubernetes.io/mps.partage.dev", 3, ""))
	apply(t, ns, podAsking("any-partitions", "deviceclass.resource.kubernetes.io/mig.nvidia.com", 2, ""))
	eventually(t, "an event that the claim is refused", func(ctx context.Context) (bool, string) {
		seen := events(ctx, ns, "any-partitions")
		for _, event := range seen {
			if strings.Contains(event, "exceeded quota") {
				return true, event
			}
		}
		return false, strings.Join(seen, " | ")
	})
	t.Log(strings.Join(events(t.Context(), ns, "any-partitions"), "\n"))
	apply(t, ns, manifests[1])
	eventually(t, "limit range", func(ctx context.Context) (bool, string) { return true, "" })
	refused(podAsking("two-gpus", "nvidia.com/gpu", 2, ""))
	t.Logf("%d texts", said)
}
