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
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// quotaTexts are the manifests of docs/how-to/quota.md, and what is said to those who ask for more, which must be among it as well
// where the page quotes it.
func quotaTexts(t *testing.T) (manifests, messages []string) {
	t.Helper()
	read := func(path string) string {
		text, err := os.ReadFile(filepath.Join(repoRoot, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	page := read("docs/how-to/quota.md")
	for _, found := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(page, -1) {
		manifests = append(manifests, found[1])
	}
	messages = strings.Split(strings.TrimSpace(read("test/e2e/testdata/quota.txt")), "\n")
	for _, found := range regexp.MustCompile("(?s)```text\n(.*?)\n```").FindAllStringSubmatch(page, -1) {
		for quoted := range strings.SplitSeq(found[1], "\n") {
			if !slices.Contains(messages, quoted) {
				t.Errorf("the page quotes what nobody says: %s", quoted)
			}
		}
	}
	return manifests, messages
}

// chosenNames are what the API server appends to the names of claims that the scheduler makes.
var chosenNames = regexp.MustCompile(`-extended-resources-[a-z0-9]{5}`)

// TestQuota follows docs/how-to/quota.md: what each number counts, and what is said to those who ask for more.
func TestQuota(t *testing.T) {
	manifests, messages := quotaTexts(t)
	if len(manifests) != 1 {
		t.Fatalf("the page has %d manifests", len(manifests))
	}
	ns := reserveNode(t)
	said := 0
	mustSay := func(text string) {
		t.Helper()
		said++
		if !slices.Contains(messages, text) {
			t.Errorf("testdata/quota.txt lacks\n%s", text)
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

	// A claim counts for its class, which is not the one of the resource.
	refused(claim("three-gpus", request{class: "gpu.nvidia.com", count: 3}, ""))
	apply(t, ns, claim("one-gpu", request{class: "gpu.nvidia.com"}, ""))
	used(map[string]string{byClass: "1", byResource: "0"})
	// A pod with a resource is judged before it is scheduled, and counts once when it has its claim.
	refused(podAsking("three-more", "nvidia.com/gpu", 3, ""))
	apply(t, ns, podAsking("one-more", "nvidia.com/gpu", 1, ""))
	waitRunning(t, ns, "one-more")
	used(map[string]string{byClass: "1", byResource: "1", "count/resourceclaims.resource.k8s.io": "2"})

	// The resource of a profile limits claims of its class, too.
	refused(podAsking("two-partitions", "nvidia.com/mig-1g.10gb", 2, ""))
	refused(claim("two-partitions", request{class: "mig-1g.10gb.nvidia.com", count: 2}, ""))
	// Shares count as devices, whatever memory they ask for.
	refused(claim("three-shares", request{class: "mps.partage.dev", count: 3}, ""))
	apply(t, ns, claim("large-share", mpsShare("70Gi", 100), ""))
	used(map[string]string{"mps.partage.dev.deviceclass.resource.k8s.io/devices": "1"})
	refused(podAsking("three-shares", "deviceclass.resource.kubernetes.io/mps.partage.dev", 3, ""))
	// Without a number for the resource of the pod, the pod is taken, and its claim refused later.
	told := func(pod, reason string) {
		t.Helper()
		var text string
		eventually(t, "an event that the claim of pod "+pod+" is refused", func(ctx context.Context) (bool, string) {
			seen := events(ctx, ns, pod)
			at := slices.IndexFunc(seen, func(event string) bool {
				return strings.HasPrefix(event, reason+": ") && strings.Contains(event, "exceeded quota")
			})
			if at >= 0 {
				text = seen[at]
			}
			return at >= 0, strings.Join(seen, " | ")
		})
		mustSay(chosenNames.ReplaceAllString(strings.ReplaceAll(text, ns, "team-a"), "-extended-resources-xxxxx"))
	}
	apply(t, ns, podAsking("two-partitions", "deviceclass.resource.kubernetes.io/mig.nvidia.com", 2, ""))
	told("two-partitions", "FailedScheduling")
	apply(t, ns, podAsking("third-gpu", "deviceclass.resource.kubernetes.io/gpu.nvidia.com", 2, ""))
	told("third-gpu", "FailedScheduling")

	// What a LimitRange allows at most it gives to all.
	apply(t, ns, "apiVersion: v1\nkind: LimitRange\nmetadata: {name: one-gpu}\nspec: {limits: [{type: Container, max: {nvidia.com/gpu: 1}}]}\n")
	cmd := exec.CommandContext(t.Context(), "kubectl", "create", "-n", ns, "--dry-run=server", "-o", "jsonpath={.spec.containers[0].resources.limits}", "-f", "-")
	cmd.Stdin = strings.NewReader(podAsking("no-gpu", "cpu", 1, ""))
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), `"nvidia.com/gpu":"1"`) {
		t.Errorf("a container that asks for no GPU has the limits %s, %v", out, err)
	}
	if t.Logf("%d texts", said); said != 8 {
		t.Errorf("%d texts", said)
	}
}
