// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

var sliceChecks = []Check{
	{ID: "pools-complete", Title: "the pools of ResourceSlices are complete", needs: []string{slicesOf}, run: poolsComplete},
	{ID: "nodes-publish", Title: "every node with GPUs and a pod of the driver has ResourceSlices", needs: []string{driverPlace, slicesOf, nodes, pods}, run: nodesPublish},
	{ID: "slices-of-nodes", Title: "ResourceSlices are of nodes that exist", needs: []string{slicesOf, nodes}, run: slicesOfNodes},
	{ID: "device-taints", Title: "no device is tainted", needs: []string{slicesOf}, run: deviceTaints},
	{ID: "taint-rules", Title: "no DeviceTaintRule keeps pods off devices", needs: []string{slicesOf, taintRules}, run: taintRulesThatApply},
}

// poolKey identifies a pool: a node's, or one without a node.
type poolKey struct{ pool, node string }

// ofDriver returns the slices of the driver, by pool.
func (f *Facts) ofDriver() map[poolKey][]*resourceapi.ResourceSlice {
	pools := map[poolKey][]*resourceapi.ResourceSlice{}
	for _, s := range f.Slices {
		if s.Spec.Driver == f.Driver {
			key := poolKey{s.Spec.Pool.Name, ptr.Deref(s.Spec.NodeName, "")}
			pools[key] = append(pools[key], s)
		}
	}
	return pools
}

func poolsComplete(f *Facts) (found findings) {
	pools := f.ofDriver()
	for _, key := range slices.SortedFunc(maps.Keys(pools), func(a, b poolKey) int {
		return cmp.Or(cmp.Compare(a.pool, b.pool), cmp.Compare(a.node, b.node))
	}) {
		newest, total := int64(-1), int64(0)
		for _, s := range pools[key] {
			if s.Spec.Pool.Generation > newest {
				newest, total = s.Spec.Pool.Generation, s.Spec.Pool.ResourceSliceCount
			}
		}
		current, old := int64(0), 0
		for _, s := range pools[key] {
			if s.Spec.Pool.Generation == newest {
				current++
			} else {
				old++
			}
		}
		pool := Ref{Kind: "pool", Name: key.pool}
		if current != total {
			found.add(Error, fmt.Sprintf("%d of %d slices of the newest generation are there: the scheduler allocates nothing of the pool", current, total),
				"If it lasts for more than a minute, read the log of the driver's pod on the node: it names the slice that it cannot write", pool)
		}
		if current == total && old > 0 {
			found.add(Warning, fmt.Sprintf("%d slices of older generations are left", old),
				"The driver removes them; if they stay, read its log on the node", pool)
		}
	}
	return found
}

func nodesPublish(f *Facts) (found findings) {
	have := byNode(f.driverPods(pluginLabel))
	for _, n := range f.Snapshot.Nodes {
		if len(have[n.Name]) == 0 || !hasGPULabel(n) || f.publishes(n.Name) {
			continue
		}
		if slices.ContainsFunc(have[n.Name], ready) {
			found.add(Error, "The node has GPUs, as its labels say, the driver's pod is ready, and there are no ResourceSlices",
				"Read the log of the driver's pod on the node: the sharing policy may offer nothing, or the GPUs are given to virtual machines (vfio-pci)",
				nodeRef(n.Name))
			continue
		}
		found.add(Error, "The node has GPUs, as its labels say, and there are no ResourceSlices: the driver's pod is not ready",
			"See driver-pods-ready", nodeRef(n.Name))
	}
	return found
}

func slicesOfNodes(f *Facts) (found findings) {
	exists := map[string]bool{}
	for _, n := range f.Snapshot.Nodes {
		exists[n.Name] = true
	}
	for _, s := range f.Slices {
		if node := ptr.Deref(s.Spec.NodeName, ""); s.Spec.Driver == f.Driver && node != "" && !exists[node] {
			found.add(Warning, fmt.Sprintf("It is of node %s, which does not exist", node),
				"Wait for the garbage collector; if it stays, kubectl delete resourceslice NAME", refTo("resourceslice", s))
		}
	}
	return found
}

// taintRemedy is what to do about a taint, by the name part of its key. Those that are
// missing here belong to a device that is as it should be.
var taintRemedy = map[string]struct {
	severity Severity
	remedy   string
}{
	"occupied": {Warning, "Somebody else made a partition there. If nobody wants it, remove it with nvidia-smi mig -dci and -dgi"},
	"foreign-claim": {Warning, "The taint's value names a claim (namespace.name, or the UID) that NVIDIA's DRA driver has prepared, or another one of this name: " +
		"delete its pods, so that they are made again with devices of this driver (docs/how-to/troubleshoot.md#another-gpu-driver-runs-on-the-node)"},
	"release-pending": {Warning, "What a claim left could not be removed yet. If it lasts, the event GPUReleasePending of the node says what " +
		"prevents it, often a process that still runs"},
	"opened": {Warning, "A process without a claim has the GPU's device node open; the event GPUOpened of the node says which. " +
		"An agent of the node belongs into kubeletPlugin.ignoredNamespaces (docs/how-to/free-gpus.md)"},
	"unresponsive":        {Error, "See whether the NVIDIA driver is loaded. If it lasts, drain the node and restart it"},
	"gpu-lost":            {Error, "Drain the node and restart it. If it happens again, have the GPU looked at"},
	"reset-required":      {Error, "End what uses the GPU, then reset it, or restart the node (docs/how-to/troubleshoot.md#how-to-reset-a-gpu)"},
	"xid":                 {Error, "The taint's value is the number of the error; docs/reference/xids.md says what to do about each"},
	"recovery-required":   {Error, "Do what the taint's value says, such as a reset (docs/how-to/troubleshoot.md#gpu-needs-a-reset)"},
	"uncorrected-ecc":     {Error, "It ends after a quiet time. If it happens again, contact the vendor"},
	"row-remap-pending":   {Warning, "Reset the GPU when no pod uses it"},
	"row-remap-failed":    {Error, "Reset the GPU. If it lasts, have it replaced"},
	"memory-unrepairable": {Error, "Have the GPU replaced"},
	"fabric-unhealthy":    {Error, "Look at NVLink (nvidia-smi -q, Fabric) and at the fabric manager"},
	"throttled":           {Warning, "Check cooling and power supply"},
	"unmonitored":         {Warning, "The event GPUUnmonitored of the node says why errors of the GPU are not seen, such as a driver that is too old"},
	"mps-unhealthy":       {Error, "If it lasts, delete the pods that have the device (docs/how-to/troubleshoot.md#mps-server-died)"},
	"mps-unavailable":     {Error, "Look at the pod of the MPS supervisor on the node"},
	"cordoned":            {Warning, "An administrator keeps pods away from the GPU: kubectl annotate node NODE partage.dev/cordoned-gpus- ends it (docs/how-to/troubleshoot.md#cordon-one-gpu)"},
	"gone":                {Warning, "Somebody removed the partition that a claim has: delete the claim's pods"},
}

func deviceTaints(f *Facts) (found findings) {
	f.eachDevice(func(g *fleet.GPU, d *fleet.Device) {
		for _, t := range d.Published.Taints {
			name, own := strings.CutPrefix(t.Key, f.Driver+"/")
			known, listed := taintRemedy[name]
			if !own || !listed {
				continue
			}
			severity := known.severity
			if t.Effect == resourceapi.DeviceTaintEffectNone {
				severity = Warning
			}
			message := fmt.Sprintf("Devices have the taint %s with the effect %s", name, t.Effect)
			if t.Value != "" {
				message = fmt.Sprintf("Devices have the taint %s=%s with the effect %s", name, t.Value, t.Effect)
			}
			found.add(severity, message, known.remedy, gpuRef(g))
		}
	})
	return found
}

func gpuRef(g *fleet.GPU) Ref {
	return Ref{Kind: "gpu", Name: g.Node.Name + "/" + cmp.Or(g.PCIBusID, g.Name)}
}

// eachDevice visits the devices of the driver.
func (f *Facts) eachDevice(visit func(*fleet.GPU, *fleet.Device)) {
	for _, n := range f.Nodes {
		for _, g := range n.GPUs {
			for _, d := range g.Devices {
				visit(g, d)
			}
		}
	}
}

func taintRulesThatApply(f *Facts) (found findings) {
	for _, r := range f.TaintRules {
		if r.Spec.Taint.Effect == resourceapi.DeviceTaintEffectNone {
			continue
		}
		devices := 0
		f.eachDevice(func(_ *fleet.GPU, d *fleet.Device) {
			for _, t := range d.Taints[len(d.Published.Taints):] {
				if t.Key == r.Spec.Taint.Key && t.Value == r.Spec.Taint.Value && t.Effect == r.Spec.Taint.Effect {
					devices++
					return
				}
			}
		})
		if devices > 0 {
			found.add(Warning, fmt.Sprintf("It gives the taint %s with the effect %s to %d devices of the driver", r.Spec.Taint.Key, r.Spec.Taint.Effect, devices),
				"If that is over, kubectl delete devicetaintrule NAME", refTo("devicetaintrule", r))
		}
	}
	return found
}
