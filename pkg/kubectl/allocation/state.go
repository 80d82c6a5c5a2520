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

// state is what claims hold of a pool's devices. The allocator gets that of a node's pools only:
// it goes through all shares of a state for each device.
type state struct {
	alone  sets.Set[string]
	shared map[string][]*resourceapi.DeviceRequestAllocationResult
}

func newState() *state {
	return &state{alone: sets.New[string](), shared: map[string][]*resourceapi.DeviceRequestAllocationResult{}}
}

func (s *state) holds(device string) bool {
	return s != nil && (s.alone.Has(device) || len(s.shared[device]) > 0)
}

// holders are the claims that hold devices, those of each pool, and the states that follow from them. They are never changed: those of
// other circumstances share what is the same.
type holders struct {
	features structured.Features
	claims   []*resourceapi.ResourceClaim
	ofPool   map[poolID][]*resourceapi.ResourceClaim
	states   map[poolID]*state
}

// holdersOf takes what claims hold.
func holdersOf(all []*resourceapi.ResourceClaim, f structured.Features) *holders {
	h := &holders{features: f, ofPool: map[poolID][]*resourceapi.ResourceClaim{}, states: map[poolID]*state{}}
	for _, c := range all {
		if c.Status.Allocation != nil {
			h.claims = append(h.claims, c)
			for id := range poolsHeld(c) {
				h.ofPool[id] = append(h.ofPool[id], c)
			}
		}
	}
	for id := range h.ofPool {
		h.states[id] = h.stateOf(id)
	}
	return h
}

// without returns holders without some claims. Pools that these do not concern, which are nearly all, stay the same.
func (h *holders) without(ended []*resourceapi.ResourceClaim) *holders {
	gone, stale := sets.New(ended...), sets.New[poolID]()
	left := func(of []*resourceapi.ResourceClaim) []*resourceapi.ResourceClaim {
		return slices.DeleteFunc(slices.Clone(of), gone.Has)
	}
	rest := &holders{features: h.features, claims: left(h.claims), ofPool: maps.Clone(h.ofPool), states: maps.Clone(h.states)}
	for _, c := range ended {
		stale = stale.Union(poolsHeld(c))
	}
	for id := range stale {
		rest.ofPool[id] = left(h.ofPool[id])
		rest.states[id] = rest.stateOf(id)
	}
	return rest
}

// stateOf computes the state of a pool.
func (h *holders) stateOf(id poolID) *state {
	s := newState()
	for _, c := range h.ofPool[id] {
		forEachDevice(c, func(r *resourceapi.DeviceRequestAllocationResult) {
			switch {
			case r.Driver != id.driver || r.Pool != id.pool:
			case isShare(r, h.features):
				s.shared[r.Device] = append(s.shared[r.Device], r)
			default:
				s.alone.Insert(r.Device)
			}
		})
	}
	return s
}

// poolsHeld returns the pools that a claim holds devices of.
func poolsHeld(c *resourceapi.ResourceClaim) sets.Set[poolID] {
	pools := sets.New[poolID]()
	forEachDevice(c, func(r *resourceapi.DeviceRequestAllocationResult) { pools.Insert(poolID{r.Driver, r.Pool}) })
	return pools
}

// forEachDevice calls f for what counts as allocated: a device with admin access does not.
func forEachDevice(c *resourceapi.ResourceClaim, f func(*resourceapi.DeviceRequestAllocationResult)) {
	if c.Status.Allocation == nil {
		return
	}
	for i := range c.Status.Allocation.Devices.Results {
		if r := &c.Status.Allocation.Devices.Results[i]; !ptr.Deref(r.AdminAccess, false) {
			f(r)
		}
	}
}

func isShare(r *resourceapi.DeviceRequestAllocationResult, f structured.Features) bool {
	return f.ConsumableCapacity && r.ShareID != nil
}

// allocated returns the allocator's view of what is held of some pools.
func (h *holders) allocated(pools []poolID) structured.AllocatedState {
	out := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, id := range pools {
		s := h.states[id]
		if s == nil {
			continue
		}
		for device := range s.alone {
			out.AllocatedDevices.Insert(structured.MakeDeviceID(id.driver, id.pool, device))
		}
		for device, shares := range s.shared {
			deviceID := structured.MakeDeviceID(id.driver, id.pool, device)
			for _, r := range shares {
				out.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(deviceID, r.ShareID))
				if r.ConsumedCapacity != nil {
					out.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(deviceID, r.ConsumedCapacity))
				}
			}
		}
	}
	return out
}
