// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// DefaultFeatures are those that Kubernetes 1.37 has on unless they are turned off.
var DefaultFeatures = structured.Features{
	AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
	PartitionableDevices: true, PrioritizedList: true,
}

// featuresOf returns what the scheduler of a cluster supports, and what of that is assumed. The
// API server drops fields whose feature gate is off: a field that is set is evidence.
func featuresOf(s *fleet.Snapshot) (structured.Features, []string) {
	f, seen := DefaultFeatures, structured.Features{}
	for _, slice := range s.Slices {
		seen.PartitionableDevices = seen.PartitionableDevices || len(slice.Spec.SharedCounters) > 0
		seen.OptionalNodeOperations = seen.OptionalNodeOperations || len(slice.Spec.SkipNodeOperations) > 0
		for i := range slice.Spec.Devices {
			seeDevice(&seen, &slice.Spec.Devices[i])
		}
	}
	f.CompatibilityGroups = seen.CompatibilityGroups
	f.FractionalCapacityRange = seen.FractionalCapacityRange
	f.ListTypeAttributes = seen.ListTypeAttributes
	f.OptionalNodeOperations = seen.OptionalNodeOperations
	assumed := sets.List(DefaultFeatures.Set().Difference(seen.Set()))
	if len(assumed) == 0 {
		return f, nil
	}
	return f, []string{fmt.Sprintf("The scheduler is assumed to have what Kubernetes 1.37 has on by default: nothing in the cluster shows whether %s is.", strings.Join(assumed, ", "))}
}

func seeDevice(seen *structured.Features, d *resourceapi.Device) {
	seen.ConsumableCapacity = seen.ConsumableCapacity || d.AllowMultipleAllocations != nil
	seen.DeviceTaints = seen.DeviceTaints || len(d.Taints) > 0
	for _, c := range d.ConsumesCounters {
		seen.CompatibilityGroups = seen.CompatibilityGroups || len(c.CompatibilityGroups) > 0
	}
	for _, a := range d.Attributes {
		seen.ListTypeAttributes = seen.ListTypeAttributes || a.IntValues != nil || a.BoolValues != nil || a.StringValues != nil || a.VersionValues != nil
	}
	for _, c := range d.Capacity {
		r := ptr.Deref(ptr.Deref(c.RequestPolicy, resourceapi.CapacityRequestPolicy{}).ValidRange, resourceapi.CapacityRequestPolicyRange{})
		for _, q := range []*resource.Quantity{r.Min, r.Max, r.Step} {
			if q != nil {
				_, whole := q.AsInt64()
				seen.FractionalCapacityRange = seen.FractionalCapacityRange || !whole
			}
		}
	}
}
