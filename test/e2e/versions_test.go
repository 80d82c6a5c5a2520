//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/test/versions"
)

// TestVersion checks that the driver offers on this cluster's version of Kubernetes what PARTAGE_VERSIONS_KINDS names, says what it
// leaves out, runs the demos that need no more, except PARTAGE_VERSIONS_WITHOUT, and that no device is given twice. What it saw goes to
// the file PARTAGE_VERSIONS_REPORT. test/versions/run sets them.
func TestVersion(t *testing.T) {
	file := os.Getenv("PARTAGE_VERSIONS_REPORT")
	if file == "" {
		t.Skip("test/versions/run runs it")
	}
	server, err := client.Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	report := versions.Report{Kubernetes: server.GitVersion, FeatureGates: os.Getenv("PARTAGE_VERSIONS_GATES")}
	node := driverPod(t, pluginComponent).Spec.NodeName
	report.Kubelet = olderKubelet(t, node, report.Kubernetes)
	want := strings.Fields(os.Getenv("PARTAGE_VERSIONS_KINDS"))
	report.Devices = publishedKinds(t)
	if got := slices.Sorted(maps.Keys(report.Devices)); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
		t.Errorf("the driver offers %v on Kubernetes %s, want the kinds %v", report.Devices, report.Kubernetes, want)
	}
	report.Taints = storesTaints(t)
	report.ExtendedResources = storesResourceNames(t) && forResourceNames(t)
	report.Said = saidAboutOffer(t)
	for kind, word := range map[string]string{"mig": "partition", "mps": "share"} {
		if report.Devices[kind] == 0 && !strings.Contains(strings.Join(report.Said, "\n"), word) {
			t.Errorf("the driver offers no %ss and does not say why; it says:\n%s", word, strings.Join(report.Said, "\n"))
		}
	}
	if report.Kubelet != "" {
		t.Run("old kubelet", func(t *testing.T) { staysWithoutGPU(t, node) })
		t.Run("text for Kubernetes", func(t *testing.T) {
			page, err := os.ReadFile(filepath.Join(repoRoot, "docs/contributing/upstream/kubelet-skew.md"))
			if err != nil {
				t.Fatal(err)
			}
			wantPrinted(t, page, 1)
		})
	}
	t.Run("demos", func(t *testing.T) { runDemos(t, &report) })
	t.Run("full", func(t *testing.T) { report.Full = fill(t, report.Devices) })
	if t.Failed() {
		return
	}
	if err := report.Save(file); err != nil {
		t.Fatal(err)
	}
}

// olderKubelet returns the version of a node's kubelet if it is not that of the API server.
func olderKubelet(t *testing.T, node, server string) string {
	t.Helper()
	n, err := client.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n.Status.NodeInfo.KubeletVersion == server {
		return ""
	}
	return n.Status.NodeInfo.KubeletVersion
}

// staysWithoutGPU checks that a pod which the kubelet would start without its GPU is not scheduled, and that people are told why.
func staysWithoutGPU(t *testing.T, node string) {
	ns := reserveNode(t)
	apply(t, ns, podAsking("by-limits", gpuResource, 1, ""))
	eventually(t, "the scheduler to find no GPU for the pod", func(ctx context.Context) (bool, string) {
		seen := strings.Join(events(ctx, ns, "by-limits"), " | ")
		return strings.Contains(seen, "FailedScheduling"), seen
	})
	p, err := client.CoreV1().Pods(ns).Get(t.Context(), "by-limits", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if p.Spec.NodeName != "" || p.Status.ExtendedResourceClaimStatus != nil {
		t.Errorf("the pod is on node %q with %v", p.Spec.NodeName, p.Status.ExtendedResourceClaimStatus)
	}
	eventually(t, "an event of the node", func(ctx context.Context) (bool, string) {
		seen := strings.Join(events(ctx, "default", node), " | ")
		return strings.Contains(seen, "ExtendedResourcesOff"), seen
	})
}

// publishedKinds waits until the pool is complete and counts its devices by type.
func publishedKinds(t *testing.T) map[string]int {
	t.Helper()
	gpus := len(showMachine(t).GPUs)
	var kinds map[string]int
	eventually(t, "the pool to be complete", func(ctx context.Context) (bool, string) {
		published, err := publishedSlices(ctx)
		if err != nil || len(published) == 0 {
			return false, fmt.Sprint("no slices: ", err)
		}
		kinds = map[string]int{}
		complete := true
		for _, s := range published {
			complete = complete && s.Spec.Pool.Generation == published[0].Spec.Pool.Generation && s.Spec.Pool.ResourceSliceCount == int64(len(published))
			for _, d := range s.Spec.Devices {
				kinds[*d.Attributes["type"].StringValue]++
			}
		}
		return complete && kinds["gpu"] == gpus, fmt.Sprintf("%d slices with %v", len(published), kinds)
	})
	return kinds
}

// storesTaints says whether the API server keeps the taints of a device.
func storesTaints(t *testing.T) bool {
	t.Helper()
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "e2e.example.com", NodeName: ptr.To("n1"), Pool: resourceapi.ResourcePool{Name: "e2e", ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "d", Taints: []resourceapi.DeviceTaint{{Key: "e2e", Effect: resourceapi.DeviceTaintEffectNoSchedule}}}},
		},
	}
	stored, err := client.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		t.Fatal(err)
	}
	return len(stored.Spec.Devices[0].Taints) > 0
}

// storesResourceNames says whether the API server kept the resource name that the chart gave a class.
func storesResourceNames(t *testing.T) bool {
	t.Helper()
	class, err := client.ResourceV1().DeviceClasses().Get(t.Context(), "gpu.resource.partage.dev", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return class.Spec.ExtendedResourceName != nil
}

// forResourceNames says whether the driver publishes its devices for resource names, which it does where the kubelet knows them.
func forResourceNames(t *testing.T) bool {
	t.Helper()
	published, err := publishedSlices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(published, func(s resourceapi.ResourceSlice) bool {
		return slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool {
			_, has := d.Attributes[device.ExtendedResources]
			return has
		})
	})
}

// offerMessage matches the plugin's log where it says what the cluster lacks.
var offerMessage = regexp.MustCompile(`\] "((?:Publishing|Only|No|The API server does not store) [^"]*)"`)

// saidAboutOffer returns what the plugin says about what it leaves out, in warnings about the node and in its log.
func saidAboutOffer(t *testing.T) []string {
	t.Helper()
	list, err := client.CoreV1().Events(corev1.NamespaceAll).List(t.Context(), metav1.ListOptions{
		FieldSelector: "involvedObject.kind=Node,type=" + corev1.EventTypeWarning,
	})
	if err != nil {
		t.Fatal(err)
	}
	var said []string
	for _, e := range list.Items {
		if e.Source.Component == driverName {
			said = append(said, e.Message)
		}
	}
	pod := driverPod(t, pluginComponent)
	for _, match := range offerMessage.FindAllStringSubmatch(logs(t, driverNamespace, pod.Name, "plugin"), -1) {
		if !slices.Contains(said, match[1]) {
			said = append(said, match[1])
		}
	}
	slices.Sort(said)
	return said
}

// runDemos runs, together, the demos for this machine that need nothing that is missing.
func runDemos(t *testing.T, report *versions.Report) {
	has := map[string]bool{
		"partitions": report.Devices["mig"] > 0, "shares": report.Devices["mps"] > 0 && report.Devices["timeslice"] > 0,
		"observers": report.Devices["observer"] > 0, "extended-resources": report.ExtendedResources,
	}
	report.OtherDemos = map[string][]string{}
	for _, name := range strings.Fields(os.Getenv("PARTAGE_VERSIONS_WITHOUT")) {
		report.OtherDemos[name] = []string{"scheduler"}
	}
	for _, path := range demoManifests(t) {
		folder := filepath.Dir(path)
		name := filepath.Base(folder)
		if demoFile(t, folder, "machine", usualMachine) != demoMachine() {
			continue
		}
		for _, need := range strings.Fields(demoFile(t, folder, "needs", "")) {
			supported, known := has[need]
			if !known {
				t.Errorf("demo %s needs %q, which is none of %v", name, need, slices.Sorted(maps.Keys(has)))
			}
			if !supported {
				report.OtherDemos[name] = append(report.OtherDemos[name], need)
			}
		}
		if report.OtherDemos[name] == nil {
			report.Demos = append(report.Demos, name)
		}
	}
	if len(report.Demos) < 2 {
		t.Fatalf("only %v of the demos can run here", report.Demos)
	}
	reserveNode(t)
	out, runErr := demoRun(t, report.Demos...).CombinedOutput()
	if out, err := demoRun(t, append([]string{"-d"}, report.Demos...)...).CombinedOutput(); err != nil {
		t.Errorf("demo/run -d: %v\n%s", err, out)
	}
	if runErr != nil {
		t.Errorf("demo/run %s: %v\n%s", strings.Join(report.Demos, " "), runErr, out)
	}
}
