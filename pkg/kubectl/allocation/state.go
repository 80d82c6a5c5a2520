// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
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
	p.claims, p.states = nil, map[poolID]*state{}
	for _, c := range all {
		if c.Status.Allocation != nil {
			p.claims = append(p.claims, c)
			p.hold(c, func(poolID) bool { return true })
		}
	}
}

// renewStates computes the states of the pools that changed claims concern from p.claims. The
// others stay those of the Planner that p was cloned of.
func (p *Planner) renewStates(changed []*resourceapi.ResourceClaim) {
	stale := sets.New[poolID]()
	for _, c := range changed {
		forEachDevice(c, func(r *resourceapi.DeviceRequestAllocationResult) { stale.Insert(poolID{r.Driver, r.Pool}) })
	}
	states := make(map[poolID]*state, len(p.states))
	for id, s := range p.states {
		if !stale.Has(id) {
			states[id] = s
		}
	}
	p.states = states
	for _, c := range p.claims {
		p.hold(c, stale.Has)
	}
}

func (p *Planner) hold(c *resourceapi.ResourceClaim, wanted func(poolID) bool) {
	forEachDevice(c, func(r *resourceapi.DeviceRequestAllocationResult) {
		id := poolID{r.Driver, r.Pool}
		if !wanted(id) {
			return
		}
		s := p.states[id]
		if s == nil {
			s = newState()
			p.states[id] = s
		}
		if isShare(r, p.features) {
			s.shared[r.Device] = append(s.shared[r.Device], r)
			return
		}
		s.alone.Insert(r.Device)
	})
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
