// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"maps"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
)

// asked are the devices that the kubelet has asked for since the last look. They
// are allocated, even if preparing them fails and no record says so.
type asked struct {
	mu    sync.Mutex
	names map[string]bool
}

func (a *asked) note(c *resourceapi.ResourceClaim, driver, pool string) {
	if c.Status.Allocation == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, result := range c.Status.Allocation.Devices.Results {
		if result.Driver != driver || result.Pool != pool {
			continue
		}
		if a.names == nil {
			a.names = map[string]bool{}
		}
		a.names[result.Device] = true
	}
}

// take empties the list.
func (a *asked) take() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	names := slices.Collect(maps.Keys(a.names))
	a.names = nil
	return names
}
