//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	devicePlugin = "nvidia-device-plugin"
	// Pods of the two plugins.
	devicePluginPods = "app.kubernetes.io/name=" + devicePlugin
	partagePods      = "app.kubernetes.io/component=" + pluginComponent
)

// devicePluginConfig has two configurations: GPUs are whole, or have four replicas.
const devicePluginConfig = `
config:
  default: whole
  map:
    whole: |-
      version: v1
      flags: {migStrategy: none}
    shared: |-
      version: v1
      flags: {migStrategy: none}
      sharing:
        timeSlicing:
          resources:
          - {name: nvidia.com/gpu, replicas: 4}
`

// TestMigrationFromDevicePlugin follows docs/how-to/migrate/device-plugin.md from a cluster that NVIDIA's own device plugin serves to
// one that Partage serves, with one node moved back in between and at the end. Of two nodes, one has whole GPUs and one has time-slicing. A
// Deployment that fills all of it is never changed.
func TestMigrationFromDevicePlugin(t *testing.T) {
	ns, dir := migrant(t)
	chart := peer("k8s-device-plugin", devicePlugin)
	g := openGuide(t, "docs/how-to/migrate/device-plugin.md", dir, "nvdp/nvidia-device-plugin", chart)

	kubectl(t, "label", "node", sharedNode, "nvidia.com/device-plugin.config=shared")
	t.Cleanup(func() { kubectl(t, "label", "node", sharedNode, "nvidia.com/device-plugin.config-") })
	// The plugin starts twice on a node whose configuration is not the default. The kubelet loses track of one that registers twice
	// within milliseconds (see the guide), which a driver that takes some time to start keeps it from.
	if _, err := onNode(t.Context(), sharedNode, "bin/gpusim", "latency", "--root", machineRoot, "--scale", "100", "hopper"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := onNode(context.WithoutCancel(t.Context()), sharedNode, "bin/gpusim", "latency", "--root", machineRoot, "zero"); err != nil {
			t.Error(err)
		}
	})
	values := filepath.Join(dir, "device-plugin.yaml")
	if err := os.WriteFile(values, []byte(devicePluginConfig), 0o600); err != nil {
		t.Fatal(err)
	}
	installPeer(t, devicePlugin, chart, "--values", values, "--set", strings.Join([]string{
		"image.repository=partage.invalid/k8s-device-plugin", "image.tag=dev", "image.pullPolicy=Never",
		"nvidiaDriverRoot=" + machineRoot, "nvidiaDevRoot=" + machineRoot, "deviceDiscoveryStrategy=nvml",
		"deviceListStrategy=cdi-cri", "cdi.nvidiaHookPath=" + filepath.Join(repoRoot, "bin", "nvidia-cdi-hook"),
	}, ","))
	waitAllocatable(t, wholeNode, 2)
	waitAllocatable(t, sharedNode, 8)
	all := map[string]int{wholeNode: 2, sharedNode: 8}
	apply(t, ns, oldDeployment("work", 10))
	before := podsByNode(t, ns, "work", all)
	wantGPUs(t, ns, wholeNode, before[wholeNode], 1)
	wantClaims(t, ns, before[wholeNode], false)

	g.run(t, []string{"GPU_NODES=2", "VERSION=0.20.0"}, "label", "select")
	g.run(t, nil, "translate", "install", "classes")
	runsOn(t, devicePlugin, devicePluginPods, wholeNode, sharedNode)
	runsOn(t, driverNamespace, partagePods)
	if after := podsByNode(t, ns, "work", all); !sameNames(before, after) {
		t.Errorf("the pods were %v and are %v", before, after)
	}

	// One node has the device plugin and one has Partage.
	move := func(node string) {
		t.Helper()
		g.run(t, onNodeNamed(node), "drain")
		waitWithoutPlace(t, ns, "work", all[node])
		g.run(t, onNodeNamed(node), "move", "uncordon")
	}
	move(wholeNode)
	waitAllocatable(t, wholeNode, 0)
	runsOn(t, devicePlugin, devicePluginPods, sharedNode)
	mixed := podsByNode(t, ns, "work", all)
	wantGPUs(t, ns, wholeNode, mixed[wholeNode], 1)
	wantClaims(t, ns, mixed[wholeNode], true)
	wantClaims(t, ns, mixed[sharedNode], false)
	kubectl(t, "scale", "deployment", "work", "--replicas", "11", "-n", ns)
	waitWithoutPlace(t, ns, "work", 1)
	kubectl(t, "scale", "deployment", "work", "--replicas", "10", "-n", ns)

	// Back, and forth again.
	g.run(t, onNodeNamed(wholeNode), "drain", "back", "uncordon")
	waitAllocatable(t, wholeNode, 2)
	back := podsByNode(t, ns, "work", all)
	wantGPUs(t, ns, wholeNode, back[wholeNode], 1)
	wantClaims(t, ns, back[wholeNode], false)
	move(wholeNode)
	move(sharedNode)

	g.run(t, nil, "finish")
	runsOn(t, devicePlugin, devicePluginPods)
	runsOn(t, driverNamespace, partagePods, wholeNode, sharedNode)
	last := podsByNode(t, ns, "work", all)
	wantGPUs(t, ns, wholeNode, last[wholeNode], 1)
	wantGPUs(t, ns, sharedNode, last[sharedNode], 4)
	wantClaims(t, ns, last[wholeNode], true)
	wantClaims(t, ns, last[sharedNode], true)

	// Back after the last step.
	g.run(t, []string{"VERSION=0.20.0"}, "return")
	runsOn(t, devicePlugin, devicePluginPods)
	g.run(t, onNodeNamed(wholeNode), "drain", "back", "uncordon")
	runsOn(t, devicePlugin, devicePluginPods, wholeNode)
	runsOn(t, driverNamespace, partagePods, sharedNode)
	returned := podsByNode(t, ns, "work", all)
	wantGPUs(t, ns, wholeNode, returned[wholeNode], 1)
	wantClaims(t, ns, returned[wholeNode], false)
	record(t, "NVIDIA device plugin", "two nodes move, one also back, under a Deployment that nobody changes")
}

// sameNames reports whether the same pods are on each node.
func sameNames(a, b map[string][]string) bool {
	for node := range a {
		if len(a[node]) != len(b[node]) {
			return false
		}
		for _, name := range a[node] {
			if !strings.Contains(" "+strings.Join(b[node], " ")+" ", " "+name+" ") {
				return false
			}
		}
	}
	return true
}
