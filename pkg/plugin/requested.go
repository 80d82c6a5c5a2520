// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"maps"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
)

// requestedDevices are the devices of this driver's pool that the kubelet asked to
// prepare since the list was last emptied. They are allocated, even if preparing
// them fails and no record says so.
type requestedDevices struct {
	driverName, poolName string

	mu    sync.Mutex
	names map[string]bool
}

// add notes the devices of a claim and returns their names.
func (r *requestedDevices) add(c *resourceapi.ResourceClaim) []string {
	devices := r.of(c)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range devices {
		if r.names == nil {
			r.names = map[string]bool{}
		}
		r.names[name] = true
	}
	return devices
}

// of lists the devices that a claim was allocated, by name.
func (r *requestedDevices) of(c *resourceapi.ResourceClaim) []string {
	var devices []string
	for _, result := range r.results(c) {
		devices = append(devices, result.Device)
	}
	return devices
}

// results are what a claim was allocated of this driver's pool.
func (r *requestedDevices) results(c *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if c.Status.Allocation == nil {
		return nil
	}
	var own []resourceapi.DeviceRequestAllocationResult
	for _, result := range c.Status.Allocation.Devices.Results {
		if result.Driver == r.driverName && result.Pool == r.poolName {
			own = append(own, result)
		}
	}
	return own
}

// drain returns the names and empties the list.
func (r *requestedDevices) drain() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := slices.Collect(maps.Keys(r.names))
	r.names = nil
	return names
}
