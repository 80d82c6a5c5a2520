// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/partage-dev/partage/pkg/device"
)

// Reasons of events.
const (
	reasonLeftOut          = "ClusterLacksFeature"
	reasonSchedulerCrashes = "SchedulerCrashes"
)

// leftOut says why devices of this inventory are not among those that are wanted, or nothing if all are.
func (f *features) leftOut(p pool, inventory *device.Inventory, wanted []resourceslice.Slice) string {
	all := Resources(p.driverName, p.nodeName, inventory, AllFeatures).Pools[p.nodeName].Slices
	if countDevices(all) == countDevices(wanted) {
		return ""
	}
	const noticed = "; this is noticed within an hour"
	faults, _ := device.FaultsOfScheduler(f.version)
	switch {
	case faults.IgnoresCounters:
		return fmt.Sprintf("Only whole GPUs are offered, because the scheduler of Kubernetes %s ignores the counters "+
			"that MIG partitions and shares need: upgrade to 1.36.2 or later%s", f.version, noticed)
	case !f.now.PartitionableDevices:
		return "Only whole GPUs are offered, because the API server does not store the counters that MIG partitions and shares need: " +
			"turn on the feature gate " + gatePartitionable + " (Kubernetes 1.35; on by default from 1.36) " +
			"in kube-apiserver, kube-scheduler and kube-controller-manager" + noticed
	case !f.now.ConsumableCapacity:
		return "No MPS and time-slice shares are offered, because the API server does not store what they need: " +
			"turn on the feature gate " + gateConsumable + " (Kubernetes 1.34; on by default from 1.36) " +
			"in kube-apiserver, kube-scheduler, kube-controller-manager and kubelet" + noticed
	case !f.now.ShareCounters:
		return fmt.Sprintf("No MPS and time-slice shares are offered next to other devices of a GPU, because the scheduler of Kubernetes %s "+
			"would also allocate what overlaps them (kubernetes/kubernetes#139034): upgrade to 1.36.2 or later, "+
			"or offer nothing but one kind of shares of a GPU", f.version)
	case !f.now.Taints:
		return "Nothing is offered for observation only, and devices that cannot be used may be allocated, because the API server does not store " +
			"taints: turn on the feature gate " + gateTaints + " (on by default from Kubernetes 1.36)" + noticed
	}
	return ""
}

// crashes says that a claim can bring down the scheduler because of what is published. The devices stay published: without
// their counters those that claims have would be allocated again.
func (f *features) crashes(wanted []resourceslice.Slice) string {
	faults, _ := device.FaultsOfScheduler(f.version)
	if !faults.CrashesOnAll || !drawsOnCounters(wanted) {
		return ""
	}
	return fmt.Sprintf("The scheduler of Kubernetes %s crashes, again and again, at a claim for all devices of a class of this node "+
		"(allocationMode: All, kubernetes/kubernetes#138882): upgrade to 1.35.6, 1.36.2 or later. Until then such claims must be refused: "+
		"a helm upgrade of this driver on this version makes the admission policy for that, unless the value requestPolicy.allDevices is Allow",
		f.version)
}

func drawsOnCounters(published []resourceslice.Slice) bool {
	return slices.ContainsFunc(published, func(s resourceslice.Slice) bool {
		return slices.ContainsFunc(s.Devices, func(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 })
	})
}

func countDevices(slices []resourceslice.Slice) (devices int) {
	for _, slice := range slices {
		devices += len(slice.Devices)
	}
	return devices
}
