// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// upgradeTo is the first version in which everything works by default (docs/reference/compatibility.md).
const upgradeTo = "Upgrade Kubernetes to 1.36.2 or later (docs/reference/compatibility.md)"

var (
	// firstVersion serves the API that the driver needs.
	firstVersion = version.MustParseGeneric("1.34.0")
	// gatesByDefault is the first in which the feature gates that the driver needs are on.
	gatesByDefault = version.MustParseGeneric("1.36.0")
)

func apiServerVersion(f *Facts) (found findings) {
	v, err := version.ParseGeneric(f.Version)
	if err != nil {
		found.add(Unknown, "The API server has a version that cannot be read: "+said(err.Error()), "See docs/reference/compatibility.md")
		return found
	}
	if v.LessThan(firstVersion) {
		found.add(Error, fmt.Sprintf("Kubernetes %s does not serve resource.k8s.io/v1", f.Version), upgradeTo)
		return found
	}
	faults, err := device.FaultsOfScheduler(f.Version)
	if err != nil {
		found.add(Unknown, said(err.Error()), "See docs/reference/compatibility.md")
		return found
	}
	if faults.IgnoresCounters {
		found.add(Warning, fmt.Sprintf("The scheduler of Kubernetes %s ignores counters, so that only whole GPUs are offered", f.Version), upgradeTo)
	}
	if faults.ForgetsShares {
		found.add(Warning, fmt.Sprintf("The scheduler of Kubernetes %s forgets shares that are in use (kubernetes/kubernetes#139034), "+
			"so that shares are offered only of GPUs that are nothing else", f.Version), upgradeTo)
	}
	if faults.CrashesOnAll {
		found.add(Warning, fmt.Sprintf("The scheduler of Kubernetes %s crashes, again and again, at a claim with allocationMode All (kubernetes/kubernetes#138882)", f.Version),
			"Upgrade Kubernetes to 1.35.6, 1.36.2 or later; until then let the chart refuse such claims: run "+helmUpgrade+" on this version (docs/how-to/slow-requests.md)")
	}
	if v.LessThan(gatesByDefault) {
		found.add(Warning, fmt.Sprintf("The feature gates that partitions, shares, taints and extended resources need are off by default in Kubernetes %s", f.Version),
			upgradeTo+"; or turn on DRAPartitionableDevices, DRAConsumableCapacity, DRADeviceTaints and DRAExtendedResource in the API server, the scheduler, the controller manager and the kubelets")
	}
	return found
}

func kubeletVersions(f *Facts) (found findings) {
	api, err := version.ParseGeneric(f.Version)
	if err != nil {
		return nil // apiserver-version says so
	}
	for _, n := range f.Snapshot.Nodes {
		if !f.publishes(n.Name) && !hasGPULabel(n) {
			continue
		}
		kubelet, at := n.Status.NodeInfo.KubeletVersion, nodeRef(n.Name)
		v, err := version.ParseGeneric(kubelet)
		if err != nil {
			found.add(Unknown, "The kubelet has a version that cannot be read: "+said(err.Error()), "See docs/reference/compatibility.md", at)
			continue
		}
		if v.LessThan(firstVersion) {
			found.add(Error, fmt.Sprintf("The kubelet %s is older than 1.34, which the driver needs", kubelet), "Upgrade the kubelet", at)
		}
		if knows, err := device.KnowsExtendedResources(kubelet); err == nil && !knows && !v.LessThan(firstVersion) && !api.LessThan(gatesByDefault) {
			f.extendedOn(&found, n.Name, kubelet, at)
		}
	}
	return found
}

// extendedOn adds what becomes of extended resources of classes on a node whose kubelet does not know them.
func (f *Facts) extendedOn(found *findings, node, kubelet string, at Ref) {
	var serving []string
	extended := f.ByExtendedResource()
	for _, name := range slices.Sorted(maps.Keys(extended)) {
		for _, c := range extended[name] {
			if f.hasDevicesOn(c, node) {
				serving = append(serving, fmt.Sprintf("%s (class %s)", name, c.Name))
			}
		}
	}
	const gate = ", unless its feature gate DRAExtendedResource is on, which no API tells"
	switch {
	case len(serving) > 0:
		found.add(Error, fmt.Sprintf("The kubelet %s starts pods that ask for %s without the devices of this node that they are allocated%s", kubelet, strings.Join(serving, ", "), gate),
			fmt.Sprintf("Upgrade the kubelet to 1.36 or later, or add has(device.attributes['%s'].%s) to the selector of the class", f.Driver, device.ExtendedResources), at)
	case len(extended) > 0:
		found.add(Warning, fmt.Sprintf("The kubelet %s does not know extended resources of classes, such as nvidia.com/gpu: devices of this node are for claims only, "+
			"and a pod that asks for deviceclass.resource.kubernetes.io/CLASS runs without them%s", kubelet, gate), "Upgrade the kubelet to 1.36 or later", at)
	}
	for _, c := range f.Claims {
		if c.Annotations[resourceapi.ExtendedResourceClaimAnnotation] == "true" &&
			slices.ContainsFunc(fleet.Results(c, f.Driver), func(r *resourceapi.DeviceRequestAllocationResult) bool { return r.Pool == node }) {
			found.add(Error, fmt.Sprintf("The pod that it was made for runs without its devices on node %s, whose kubelet %s does not know extended resources of classes%s", node, kubelet, gate),
				"Delete the pod, and upgrade the kubelet or write a claim", refTo("resourceclaim", c))
		}
	}
}

// hasDevicesOn reports whether a class selects devices of a node. That it cannot be evaluated another check says.
func (f *Facts) hasDevicesOn(class *resourceapi.DeviceClass, node string) bool {
	for d := range f.Devices() {
		if matches, err := selects(class, f.Driver, d.Published); d.GPU.Node.Name == node && err == nil && matches {
			return true
		}
	}
	return false
}

// featureGates looks at what was dropped: the driver publishes an observer for each GPU
// where counters are stored, and each observer has a taint.
func featureGates(f *Facts) (found findings) {
	for g := range f.GPUs() {
		observer := slices.IndexFunc(g.Devices, func(d *fleet.Device) bool { return d.Type == fleet.TypeObserver })
		switch {
		case !slices.ContainsFunc(g.Devices, func(d *fleet.Device) bool { return device.IsName(d.Name) }):
			// foreign-slices says so.
		case observer < 0:
			found.add(Warning, "Only the whole GPU is offered: the counters that partitions and shares need are not stored, or the scheduler ignores them",
				"Turn on the feature gates DRAPartitionableDevices and DRAConsumableCapacity (on by default from Kubernetes 1.36); 1.34 has to be upgraded", gpuRef(g))
		case len(g.Devices[observer].Published.Taints) == 0:
			found.add(Error, "Taints of devices are not stored, so that devices which cannot be used are allocated",
				"Turn on the feature gate DRADeviceTaints (on by default from Kubernetes 1.36)", gpuRef(g))
		}
	}
	return found
}

func cdiFailures(f *Facts) (found findings) {
	for _, e := range newestFirst(f.Events) {
		if e.InvolvedObject.Kind != "Pod" || e.Type != corev1.EventTypeWarning || !f.recent(e) {
			continue
		}
		if !strings.Contains(e.Message, "unresolvable CDI devices") && !strings.Contains(e.Message, "CDI device injection failed") {
			continue
		}
		found.add(Error, "The container runtime does not find the devices of its claim: "+said(e.Message),
			"Let the runtime read the folder that the driver writes to: enable_cdi = true and cdi_spec_dirs with host.cdiDir, /var/run/cdi (docs/how-to/real-nodes.md)", about(e))
	}
	return found
}
