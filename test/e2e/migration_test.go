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
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// migrationSuite is the suite in which NVIDIA's own programs serve the GPUs at first. test/peers/build builds them.
const migrationSuite = "migration"

// The nodes of the suite; test/e2e/run says which machine each is.
const (
	wholeNode  = "n1" // two H100
	sharedNode = "n2" // two L4
)

// A node label says which driver serves a node's GPUs.
const gpuDriverLabel = "partage.dev/gpu-driver"

// gpuResource is what old pods ask for.
const gpuResource = "nvidia.com/gpu"

// migrant is a test that moves the cluster's nodes to Partage. When it ends nothing is installed.
func migrant(t *testing.T) (ns, dir string) {
	t.Helper()
	if suite != migrationSuite {
		t.Skip("needs NVIDIA's programs, and the nodes of suite " + migrationSuite)
	}
	ns, dir = makeNamespace(t), t.TempDir()
	kubectl(t, "label", "nodes", "--all", "nvidia.com/gpu.present=true", "--overwrite")
	if err := os.Symlink(filepath.Join(repoRoot, "deployments"), filepath.Join(dir, "deployments")); err != nil {
		t.Fatal(err)
	}
	writeValues(t, filepath.Join(dir, "my-values.yaml"))
	t.Cleanup(func() {
		kubectl(t, "uncordon", wholeNode, sharedNode)
		kubectl(t, "delete", "deployments", "--all", "-n", ns)
		removeNamespace(t, ns)
		mustHelm(t, "uninstall", release, "--ignore-not-found", "--wait")
		kubectl(t, "label", "nodes", "--all", gpuDriverLabel+"-")
		// The kubelet would do that half a minute later.
		kubectl(t, "delete", "resourceslices", "--all")
	})
	return ns, dir
}

// writeValues writes the chart's values for simulated GPUs, with which the plugin notices changes sooner, and for nodes with the label.
func writeValues(t *testing.T, file string) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(repoRoot, "demo", "values-simulated.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.Unmarshal(content, &values); err != nil {
		t.Fatal(err)
	}
	plugin, ok := values["kubeletPlugin"].(map[string]any)
	if !ok {
		t.Fatalf("values %v", values)
	}
	plugin["pollInterval"], plugin["claimCheckInterval"] = "2s", "10s"
	plugin["nodeSelector"] = map[string]any{gpuDriverLabel: "partage"}
	if content, err = yaml.Marshal(values); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

// peer is the path of a chart of NVIDIA's.
func peer(repository, chart string) string {
	return filepath.Join(repoRoot, "_output/peers/src", repository, "deployments/helm", chart)
}

// installPeer installs a chart of NVIDIA's with the values that simulated GPUs need, until the test ends.
func installPeer(t *testing.T, name, chart string, values ...string) {
	t.Helper()
	args := []string{"install", name, chart, "--namespace", name, "--create-namespace", "--wait", "--timeout", waitLimit.String()}
	if out, err := exec.CommandContext(t.Context(), "helm", append(args, values...)...).CombinedOutput(); err != nil {
		t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	t.Cleanup(func() {
		out, err := exec.Command("helm", "uninstall", name, "--namespace", name, "--ignore-not-found", "--wait").CombinedOutput()
		if err != nil {
			t.Errorf("uninstalling %s: %v\n%s", name, err, out)
		}
	})
}

// oldDeployment is one as it is written for NVIDIA's device plugin: the limit says all.
func oldDeployment(name string, replicas int) string {
	return fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - {name: main, image: %[3]s, imagePullPolicy: Never, command: [sh, -c, '%[4]s'], resources: {limits: {%[5]s: 1}}}
---`, name, replicas, demoImage, listAndStay, gpuResource)
}

// podsByNode waits until a Deployment has so many ready pods on each of the nodes, and returns their names.
func podsByNode(t *testing.T, ns, deployment string, want map[string]int) map[string][]string {
	t.Helper()
	total := 0
	for _, n := range want {
		total += n
	}
	found := map[string][]string{}
	for _, p := range waitPods(t, ns, deployment, total) {
		found[p.Spec.NodeName] = append(found[p.Spec.NodeName], p.Name)
	}
	for node, n := range want {
		if len(found[node]) != n {
			t.Fatalf("the pods of %s are on %v, want %v", deployment, found, want)
		}
	}
	return found
}

// gpusSeen are the UUIDs of the GPUs that pods see, sorted. Each pod must see one.
func gpusSeen(t *testing.T, ns string, pods []string) []string {
	t.Helper()
	var all []string
	for _, pod := range pods {
		listed := gpuUUID.FindAllString(waitLog(t, ns, pod, "main", "UUID: "), -1)
		if len(listed) != 1 {
			t.Errorf("pod %s sees %v", pod, listed)
		}
		all = append(all, listed...)
	}
	slices.Sort(all)
	return all
}

// wantGPUs fails unless pods on a node see its GPUs, each by so many pods.
func wantGPUs(t *testing.T, ns, node string, pods []string, each int) {
	t.Helper()
	machine, err := machineOf(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, g := range machine.GPUs {
		want = append(want, slices.Repeat([]string{g.UUID}, each)...)
	}
	slices.Sort(want)
	if got := gpusSeen(t, ns, pods); !slices.Equal(got, want) {
		t.Errorf("pods on %s see the GPUs %v, want %v", node, got, want)
	}
}

// wantClaims fails unless the pods have, or have not, a claim that the scheduler made for what they ask for.
func wantClaims(t *testing.T, ns string, pods []string, want bool) {
	t.Helper()
	for _, name := range pods {
		p, err := client.CoreV1().Pods(ns).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Status.ExtendedResourceClaimStatus != nil; got != want {
			t.Errorf("pod %s on %s has a claim: %v, want %v", name, p.Spec.NodeName, got, want)
		}
	}
}

// waitAllocatable waits until a node's kubelet says that its device plugin has so many.
func waitAllocatable(t *testing.T, node string, want int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d allocatable %s on %s", want, gpuResource, node), func(ctx context.Context) (bool, string) {
		n, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		q, there := n.Status.Allocatable[gpuResource]
		return there && q.Value() == want, fmt.Sprintf("%v, there: %v", q.String(), there)
	})
}

// waitDevices waits until the devices in the ResourceSlices of a node have the wanted names.
func waitDevices(t *testing.T, node, what string, wanted func(names []string) bool) {
	t.Helper()
	eventually(t, "devices of "+node+": "+what, func(ctx context.Context) (bool, string) {
		list, err := slicesOf(ctx, node)
		if err != nil {
			return false, err.Error()
		}
		var names []string
		for _, s := range list {
			for _, d := range s.Spec.Devices {
				names = append(names, d.Name)
			}
		}
		return wanted(names), fmt.Sprint(names)
	})
}

// waitWithoutPlace waits until the scheduler has said that so many pods of a Deployment have no place.
func waitWithoutPlace(t *testing.T, ns, deployment string, want int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d pods of %s without a place", want, deployment), func(ctx context.Context) (bool, string) {
		pods, err := client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + deployment})
		if err != nil {
			return false, err.Error()
		}
		var waiting []string
		for _, p := range pods.Items {
			for _, c := range p.Status.Conditions {
				if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable && p.DeletionTimestamp == nil {
					waiting = append(waiting, p.Name+": "+c.Message)
				}
			}
		}
		return len(waiting) == want, strings.Join(waiting, "\n")
	})
}

// runsOn waits until a DaemonSet has a ready pod on the wanted nodes and none elsewhere.
func runsOn(t *testing.T, ns, selector string, want ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("pods %s on %v", selector, want), func(ctx context.Context) (bool, string) {
		pods, err := client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return false, err.Error()
		}
		var nodes []string
		for _, p := range pods.Items {
			nodes = append(nodes, p.Spec.NodeName)
		}
		slices.Sort(nodes)
		return slices.Equal(nodes, want), fmt.Sprint(nodes)
	})
}
