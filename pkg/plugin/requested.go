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

func (r *requestedDevices) add(c *resourceapi.ResourceClaim) {
	if c.Status.Allocation == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, result := range c.Status.Allocation.Devices.Results {
		if result.Driver != r.driverName || result.Pool != r.poolName {
			continue
		}
		if r.names == nil {
			r.names = map[string]bool{}
		}
		r.names[result.Device] = true
	}
}

// drain returns the names and empties the list.
func (r *requestedDevices) drain() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	names := slices.Collect(maps.Keys(r.names))
	r.names = nil
	return names
}
