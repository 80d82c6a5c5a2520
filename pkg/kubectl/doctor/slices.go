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

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/generation"
)

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
		newest, complete := generation.Newest(pools[key])
		old := len(pools[key]) - len(newest)
		pool := Ref{Kind: "pool", Name: key.pool}
		if !complete {
			found.add(Error, fmt.Sprintf("%d of %d slices of the newest generation are there: the scheduler allocates nothing of the pool",
				len(newest), newest[0].Spec.Pool.ResourceSliceCount),
				"If it lasts for more than a minute, read the log of the driver's pod on the node: it names the slice that it cannot write", pool)
		}
		if complete && old > 0 {
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
		if slices.ContainsFunc(have[n.Name], fleet.Ready) {
			severity := Error
			if mayLeaveAlone(f) {
				severity = Note
			}
			found.add(severity, "The node has GPUs, as its labels say, the driver's pod is ready, and there are no ResourceSlices",
				"Read the log of the driver's pod on the node: the sharing policy may offer nothing, or the GPUs are given to virtual machines (vfio-pci)",
				nodeRef(n.Name))
			continue
		}
		found.add(Error, "The node has GPUs, as its labels say, and there are no ResourceSlices: the driver's pod is not ready",
			"See driver-pods-ready", nodeRef(n.Name))
	}
	return found
}

// nodesOffer finds nodes of which nothing can be allocated, although they publish devices and no fault explains that.
func nodesOffer(f *Facts) (found findings) {
	for _, n := range f.Nodes {
		devices, withdrawn, byPeople := 0, 0, 0
		left := n.Incomplete // pools-complete says so
		for _, d := range devicesOf(n) {
			devices++
			left = left || !d.Tainted()
			switch people, policy := f.keptBy(d); {
			case people:
				byPeople++
			case policy:
				withdrawn++
			}
		}
		switch {
		case left:
		case withdrawn > 0:
			found.add(Warning, "The sharing policy offers no device of the node that could be allocated",
				"If that is not meant, correct the policy (docs/how-to/policy.md). kubectl gpu tree NODE shows what each GPU is used for", nodeRef(n.Name))
		case devices > 0 && byPeople == devices:
			found.add(Note, "People keep pods off all devices of the node: no claim gets one",
				"Nothing if that is meant; the notes of gpus and taint-rules say how to end it", nodeRef(n.Name))
		}
	}
	return found
}

// devicesOf returns the devices of a node that are for those who use them.
func devicesOf(n *fleet.Node) (all []*fleet.Device) {
	for _, g := range n.GPUs {
		all = append(all, slices.DeleteFunc(slices.Clone(g.Devices), func(d *fleet.Device) bool { return d.Type == fleet.TypeObserver })...)
	}
	return all
}

// keptBy says whether people or the sharing policy keep claims from a device.
func (f *Facts) keptBy(d *fleet.Device) (people, policy bool) {
	for _, t := range d.Taints {
		name, own := strings.CutPrefix(t.Key, f.Driver+"/")
		reason := device.Reason(name)
		if t.Effect != resourceapi.DeviceTaintEffectNone {
			people = people || !own || reason == device.Cordoned
			policy = policy || own && reason == device.Withdrawn
		}
	}
	return people, policy
}

func gpuRef(g *fleet.GPU) Ref {
	return Ref{Kind: "gpu", Name: g.Node.Name + "/" + cmp.Or(g.PCIBusID, g.Name), Label: g.Label() + " on " + g.Node.Name}
}

func taintRulesThatApply(f *Facts) (found findings) {
	for _, r := range f.TaintRules {
		if r.Spec.Taint.Effect == resourceapi.DeviceTaintEffectNone {
			continue
		}
		devices := 0
		for d := range f.Devices() {
			if fleet.RuleCovers(r, f.Driver, d.Pool, d.Name) {
				devices++
			}
		}
		if devices > 0 {
			found.addSince(r.Spec.Taint.TimeAdded, Note, fmt.Sprintf("It gives the taint %s with the effect %s to %s of the driver", r.Spec.Taint.Key, r.Spec.Taint.Effect, count(devices, "device")),
				"If that is over, kubectl delete devicetaintrule "+r.Name, refTo("devicetaintrule", r))
		}
	}
	return found
}
