// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"

	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
)

// reasonLeftOut is the reason of an event.
const reasonLeftOut = "ClusterLacksFeature"

// reportLeftOut says once what is not offered because the cluster cannot handle it,
// and how to change that.
func (p *Publisher) reportLeftOut(ctx context.Context, wanted []resourceslice.Slice) {
	all := Resources(p.pool.driverName, p.pool.nodeName, p.inventory.Load(), AllFeatures)
	missing := countDevices(all.Pools[p.pool.nodeName].Slices) - countDevices(wanted)
	message := ""
	if missing > 0 {
		message = p.features.lacking()
	}
	if !p.leftOut.Set(message) {
		return
	}
	if message == "" {
		klog.FromContext(ctx).Info("The cluster has all features that the devices of this node need")
		return
	}
	klog.FromContext(ctx).Info(message, "devicesLeftOut", missing)
	p.warn(ctx, reasonLeftOut, message)
}

// lacking says what a feature that the cluster lacks is needed for.
func (f *features) lacking() string {
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

func countDevices(slices []resourceslice.Slice) (devices int) {
	for _, slice := range slices {
		devices += len(slice.Devices)
	}
	return devices
}
