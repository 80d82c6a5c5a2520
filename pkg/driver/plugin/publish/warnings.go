// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"fmt"

	"github.com/partage-dev/partage/pkg/device"
)

// Reasons of events.
const (
	reasonLeftOut          = "ClusterLacksFeature"
	reasonSchedulerCrashes = "SchedulerCrashes"
)

// leftOut says why devices are not among those that are wanted, if some are not.
func (f *features) leftOut(some bool) string {
	if !some {
		return ""
	}
	const noticed = "; this is noticed within an hour"
	faults, _ := device.FaultsOfScheduler(f.version)
	switch {
	case faults.IgnoresCounters:
		return fmt.Sprintf("Only whole GPUs are offered, because the scheduler of Kubernetes %s ignores the counters "+
			"that MIG partitions and shares need: upgrade to 1.36.2 or later%s", f.version, noticed)
	case !f.now.has(PartitionableDevices):
		return "Only whole GPUs are offered, because the API server does not store the counters that MIG partitions and shares need: " +
			"turn on the feature gate " + gatePartitionable + " (Kubernetes 1.35; on by default from 1.36) " +
			"in kube-apiserver, kube-scheduler and kube-controller-manager" + noticed
	case !f.now.has(ConsumableCapacity):
		return "No MPS and time-slice shares are offered, because the API server does not store what they need: " +
			"turn on the feature gate " + gateConsumable + " (Kubernetes 1.34; on by default from 1.36) " +
			"in kube-apiserver, kube-scheduler, kube-controller-manager and kubelet" + noticed
	case !f.now.has(ShareCounters):
		return fmt.Sprintf("No MPS and time-slice shares are offered next to other devices of a GPU, because the scheduler of Kubernetes %s "+
			"would also allocate what overlaps them (kubernetes/kubernetes#139034): upgrade to 1.36.2 or later, "+
			"or offer nothing but one kind of shares of a GPU", f.version)
	case !f.now.has(Taints):
		return "Nothing is offered for observation only, and devices that cannot be used may be allocated, because the API server does not store " +
			"taints: turn on the feature gate " + gateTaints + " (on by default from Kubernetes 1.36)" + noticed
	}
	return ""
}

// crashes says that a claim can bring down the scheduler because of what is published, if that draws on counters. The devices stay published: without
// their counters those that claims have would be allocated again.
func (f *features) crashes(drawsOnCounters bool) string {
	faults, _ := device.FaultsOfScheduler(f.version)
	if !faults.CrashesOnAll || !drawsOnCounters {
		return ""
	}
	return fmt.Sprintf("The scheduler of Kubernetes %s crashes, again and again, at a claim for all devices of a class of this node "+
		"(allocationMode: All, kubernetes/kubernetes#138882): upgrade to 1.35.6, 1.36.2 or later. Until then such claims must be refused: "+
		"a helm upgrade of this driver on this version makes the admission policy for that, unless the value requestPolicy.allDevices is Allow",
		f.version)
}
