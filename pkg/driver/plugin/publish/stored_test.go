// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

// TestStoredBefore: what was read just before the publisher began is not read again, and does no
// harm if it is not true any more.
func TestStoredBefore(t *testing.T) {
	for name, test := range map[string]struct {
		happens func(*cluster)
		lists   int
	}{
		"nothing happens": {func(*cluster) {}, 1},
		"long ago":        {func(*cluster) { after(time.Hour) }, 1},
		"one was deleted": {func(c *cluster) { c.DeleteSlice(c.Slices()[1].Name) }, 2},
		"all are gone":    {func(c *cluster) { c.DeleteSlices() }, 2},
		"one has changed": {func(c *cluster) {
			c.EditSlice(c.Slices()[1].Name, func(s *resourceapi.ResourceSlice) { s.Spec.Devices = s.Spec.Devices[1:] })
		}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				inventory := inventoryOf(t, withoutShares(), firstGPU, secondGPU)
				r := c.start(t, "one", inventory)
				after(time.Minute)
				r.stop()
				c.holds(t, inventory, AllFeatures)
				c.take("")
				c.beforeRun = func(p *Publisher) {
					if stored, err := p.Stored(t.Context()); err != nil || len(stored) != 3 {
						t.Errorf("stored: %d slices, %v", len(stored), err)
					}
					test.happens(c)
				}
				c.start(t, "two", inventory)
				after(10 * time.Second)
				c.holds(t, inventory, AllFeatures)
				if got := c.take("list"); got != test.lists {
					t.Errorf("%d lists, want %d", got, test.lists)
				}
			})
		})
	}
}
