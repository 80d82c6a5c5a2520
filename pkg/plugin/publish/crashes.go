// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
)

// reasonSchedulerCrashes is the reason of an event.
const reasonSchedulerCrashes = "SchedulerCrashes"

// reportCrashes says once that a claim can bring down the scheduler because of what is
// published. The devices stay published: without their counters those that claims have
// would be allocated again.
func (p *Publisher) reportCrashes(ctx context.Context, wanted []resourceslice.Slice) {
	message := ""
	faults, _ := device.FaultsOfScheduler(p.features.version)
	if faults.CrashesOnAll && drawsOnCounters(wanted) {
		message = fmt.Sprintf("The scheduler of Kubernetes %s crashes, again and again, at a claim for all devices of a class of this node "+
			"(allocationMode: All, kubernetes/kubernetes#138882): upgrade to 1.35.6, 1.36.2 or later. Until then such claims must be refused: "+
			"a helm upgrade of this driver on this version makes the admission policy for that, unless the value requestPolicy.allDevices is Allow",
			p.features.version)
	}
	if !p.crashes.Set(message) || message == "" {
		return
	}
	klog.FromContext(ctx).Info(message)
	p.warn(ctx, reasonSchedulerCrashes, message)
}

func drawsOnCounters(published []resourceslice.Slice) bool {
	return slices.ContainsFunc(published, func(s resourceslice.Slice) bool {
		return slices.ContainsFunc(s.Devices, func(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 })
	})
}
