// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"maps"

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

// setClaims takes what claims hold.
func (p *Planner) setClaims(all []*resourceapi.ResourceClaim) {
	p.claims, p.holders = nil, map[poolID][]*resourceapi.ResourceClaim{}
	for _, c := range all {
		if c.Status.Allocation != nil {
			p.claims = append(p.claims, c)
			for id := range poolsHeld(c) {
				p.holders[id] = append(p.holders[id], c)
			}
		}
	}
	p.states = make(map[poolID]*state, len(p.holders))
	for id := range p.holders {
		p.states[id] = p.stateOf(id)
	}
}

// changeHolders takes claims from, or adds them to, the pools that they hold devices of. Pools
// that they do not concern, which are nearly all, stay those of the Planner that p was cloned of.
func (p *Planner) changeHolders(changed []*resourceapi.ResourceClaim, change func(of []*resourceapi.ResourceClaim, c *resourceapi.ResourceClaim) []*resourceapi.ResourceClaim) {
	holders, stale := maps.Clone(p.holders), sets.New[poolID]()
	for _, c := range changed {
		for id := range poolsHeld(c) {
			holders[id] = change(holders[id], c)
			stale.Insert(id)
		}
	}
	p.holders, p.states = holders, maps.Clone(p.states)
	for id := range stale {
		p.states[id] = p.stateOf(id)
	}
}

// stateOf computes the state of a pool.
func (p *Planner) stateOf(id poolID) *state {
	s := newState()
	for _, c := range p.holders[id] {
		forEachDevice(c, func(r *resourceapi.DeviceRequestAllocationResult) {
			switch {
			case r.Driver != id.driver || r.Pool != id.pool:
			case isShare(r, p.features):
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
func (p *Planner) allocated(pools []poolID) structured.AllocatedState {
	out := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, id := range pools {
		s := p.states[id]
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
