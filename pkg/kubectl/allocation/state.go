// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// Hold is a device, or a share of one, that a claim has and others cannot have: one with admin access counts for nothing.
type Hold struct {
	Claim  *resourceapi.ResourceClaim
	Result *resourceapi.DeviceRequestAllocationResult
}

// Alone reports whether others cannot have a share of the device.
func (h Hold) Alone() bool { return h.Result.ShareID == nil }

// state is what claims hold of a pool, by device.
type state map[string][]Hold

// statesOf returns what claims hold of each pool. The allocator gets the states of a node's pools only: it goes through all shares of a state
// for each device.
func statesOf(claims ...*resourceapi.ResourceClaim) map[poolID]state {
	out := map[poolID]state{}
	for _, c := range claims {
		if c.Status.Allocation == nil {
			continue
		}
		for i := range c.Status.Allocation.Devices.Results {
			r := &c.Status.Allocation.Devices.Results[i]
			if ptr.Deref(r.AdminAccess, false) {
				continue
			}
			id := poolID{r.Driver, r.Pool}
			if out[id] == nil {
				out[id] = state{}
			}
			out[id][r.Device] = append(out[id][r.Device], Hold{c, r})
		}
	}
	return out
}

// without returns the state after some claims have ended.
func (s state) without(ended sets.Set[*resourceapi.ResourceClaim]) state {
	rest := maps.Clone(s)
	for device, holds := range s {
		rest[device] = slices.DeleteFunc(slices.Clone(holds), func(h Hold) bool { return ended.Has(h.Claim) })
	}
	return rest
}

// allocated returns the allocator's view of what is held of some pools.
func (p *Planner) allocated(pools []poolID) structured.AllocatedState {
	out := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, id := range pools {
		for device, holds := range p.held[id] {
			deviceID := structured.MakeDeviceID(id.driver, id.pool, device)
			for _, h := range holds {
				if h.Alone() || !p.Cluster.Features.ConsumableCapacity {
					out.AllocatedDevices.Insert(deviceID)
					continue
				}
				out.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(deviceID, h.Result.ShareID))
				if h.Result.ConsumedCapacity != nil {
					out.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(deviceID, h.Result.ConsumedCapacity))
				}
			}
		}
	}
	return out
}
