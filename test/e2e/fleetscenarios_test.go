//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	a100   = "NVIDIA A100-SXM4-40GB"
	h100   = "NVIDIA H100 80GB HBM3"
	l4     = "NVIDIA L4"
	rtx    = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
	teslaT = "Tesla T4"
)

// TestFleetPools checks that every node has a pool of its own with all its GPUs.
func TestFleetPools(t *testing.T) {
	fleet(t)
	for _, node := range fleetNodes {
		waitPool(t, node)
	}
}

// TestFleetPrioritizedLists checks that claims get the best of their list that any node has left: a Blackwell GPU, else a whole node
// of Ampere, else a partition of Hopper.
func TestFleetPrioritizedLists(t *testing.T) {
	ns := fleet(t)
	list := anyOf(wholeGPU.of(rtx), wholeGPU.of(a100).times(8), oneSlice.of(h100))
	start := func(name string) {
		apply(t, ns, claimFor(name, list, "")+podUsing(name, name))
		waitRunning(t, ns, name)
	}
	start("first")
	wantChoice(t, ns, "first", "choice-0", mixedNode)
	start("second")
	wantChoice(t, ns, "second", "choice-1", ampereNode)
	if n := strings.Count(waitLog(t, ns, "second", "main", "UUID: GPU-"), "UUID: GPU-"); n != 8 {
		t.Errorf("the second pod sees %d GPUs, want 8", n)
	}
	start("third")
	waitLog(t, ns, "third", "main", "MIG 1g.10gb")

	deletePod(t, ns, "first")
	start("fourth")
	wantChoice(t, ns, "fourth", "choice-0", mixedNode)
}

// TestFleetRoleChange uses all nodes as whole GPUs, then as partitions and shares, then as whole GPUs again.
func TestFleetRoleChange(t *testing.T) {
	ns := fleet(t)
	partition := request{class: "mig.nvidia.com"}
	whole := map[string]request{
		hopperNode: wholeGPU.times(8), ampereNode: wholeGPU.times(8), mixedNode: wholeGPU.times(6),
	}
	rounds := []struct {
		name string
		pods []map[string]request // by node; those of an entry at the same time
	}{
		{"whole", []map[string]request{whole}},
		{"parts", []map[string]request{
			{
				hopperNode: partition.where("device.attributes['gpu.nvidia.com'].profile == '3g.40gb'"),
				ampereNode: mpsShare("10Gi", 25), mixedNode: partition.of(rtx),
			},
			{hopperNode: oneSlice, ampereNode: mpsShare("20Gi", 50), mixedNode: mpsShare("4Gi", 25).of(teslaT)},
		}},
		{"again", []map[string]request{whole}},
	}
	for _, round := range rounds {
		var names []string
		var manifest strings.Builder
		for i, requests := range round.pods {
			for node, r := range requests {
				name := fmt.Sprintf("%s-%s-%d", round.name, node, i)
				names = append(names, name)
				manifest.WriteString(claim(name, r, "") + podOn(node, name, []container{{"main", listAndStay, []string{name}}}))
			}
		}
		apply(t, ns, manifest.String())
		for _, name := range names {
			waitRunning(t, ns, name)
			waitLog(t, ns, name, "main", "UUID: ")
		}
		removePods(t, ns)
	}
}

// TestFleetUpgrade replaces the plugins of all nodes, one after the other, while pods run on all of them and others come and go. None
// is affected, and no device disappears.
func TestFleetUpgrade(t *testing.T) {
	ns := fleet(t)
	before := map[string]request{hopperNode: oneSlice, ampereNode: mpsShare("10Gi", 25), mixedNode: wholeGPU.of(l4)}
	uuids := map[string]string{}
	for node, r := range before {
		uuids[node] = startOn(t, ns, node, "before-"+node, r)
	}
	published := countSlices(t)
	w := watchSlices(t)

	upgraded := make(chan error, 1)
	go func() { upgraded <- upgradePlugin() }()
	during := map[string]request{hopperNode: oneSlice, ampereNode: wholeGPU, mixedNode: mpsShare("4Gi", 25).of(teslaT)}
	pods := 0
	for done := false; !done; {
		select {
		case err := <-upgraded:
			done = true
			if err != nil {
				t.Fatal(err)
			}
		default:
		}
		for node, r := range during {
			name := fmt.Sprintf("during-%d", pods)
			pods++
			startOn(t, ns, node, name, r)
			if err := client.CoreV1().Pods(ns).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%d pods were started during the upgrade", pods)
	if least := w.least(published); least < published {
		t.Errorf("for a time there were only %d of %d ResourceSlices", least, published)
	}
	for node, uuid := range uuids {
		wantDevice(t, ns, "before-"+node, uuid)
		waitPool(t, node)
	}
}

// TestFleetDrain drains a node, as for its maintenance. Its pods start elsewhere, with what is there, and nothing of them is left on
// the node. After that the node gets pods again.
func TestFleetDrain(t *testing.T) {
	ns := fleet(t)
	deployOn(t, ns, ampereNode, "served", 2, anyOf(wholeGPU.of(a100), oneSlice.of(h100)))
	t.Cleanup(func() { kubectl(t, "uncordon", ampereNode) })
	kubectl(t, "drain", ampereNode, "--ignore-daemonsets", "--timeout="+waitLimit.String())
	waitNothingLeft(t, ampereNode)
	for _, p := range waitPods(t, ns, "served", 2, ampereNode) {
		waitLog(t, ns, p.Name, "main", "MIG 1g.10gb")
	}
	waitPool(t, ampereNode)

	kubectl(t, "uncordon", ampereNode)
	startOn(t, ns, ampereNode, "after", wholeGPU)
}

// TestFleetNodeDeleted deletes the Node object of a node that runs, and lets the kubelet register it again. Its pool then belongs to the
// new object, pods that ran on it still do, and it gets new ones.
func TestFleetNodeDeleted(t *testing.T) {
	ns := fleet(t)
	uuid := startOn(t, ns, mixedNode, "before", wholeGPU.of(l4))
	waitPool(t, mixedNode)
	kubectl(t, "delete", "node", mixedNode)
	waitNodeGone(t, mixedNode)
	if _, err := onNode(t.Context(), mixedNode, "sh", "-c", "kill -KILL $(pidof kubelet)"); err != nil {
		t.Fatal(err)
	}
	waitPool(t, mixedNode)
	startOn(t, ns, mixedNode, "after", wholeGPU.of(teslaT))
	wantDevice(t, ns, "before", uuid)
}

// TestFleetNodeLost cuts the power of a node. Its pod starts elsewhere, with what is there; when the node is back, it cleans up what the
// lost pod left, and gets pods again.
func TestFleetNodeLost(t *testing.T) {
	ns := fleet(t)
	neighbour := startOn(t, ns, hopperNode, "neighbour", oneSlice)
	deployOn(t, ns, mixedNode, "served", 1, anyOf(wholeGPU.of(l4), oneSlice.of(h100)))
	t.Cleanup(func() { turnPower(t, mixedNode, "power-on") })
	turnPower(t, mixedNode, "power-off")
	replaced := waitPods(t, ns, "served", 1, mixedNode)[0]
	waitLog(t, ns, replaced.Name, "main", "MIG 1g.10gb")
	wantDevice(t, ns, "neighbour", neighbour)

	turnPower(t, mixedNode, "power-on")
	waitNothingLeft(t, mixedNode)
	waitPool(t, mixedNode)
	startOn(t, ns, mixedNode, "after", wholeGPU.of(l4))
}
