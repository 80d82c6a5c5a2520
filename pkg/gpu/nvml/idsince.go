// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
)

// idOwners are those who have the instance ids of each GPU, as far as looks at the instances show
// it. The driver uses ids again. Whoever destroys an instance of ours looks at it before, so
// that nothing but an instance of somebody else, made and gone between two looks, is missed.
type idOwners struct {
	mu   sync.Mutex
	gpus map[string]*idsOfGPU
}

// idsOfGPU are the ids of one GPU.
type idsOfGPU struct {
	// looked is when the first look was over. Nothing is known of the time before.
	looked time.Time
	owners map[int]idOwner
}

// idOwner is who has an id, by the UUIDs of its compute instances, and empty if nobody; and from
// when on no other was seen to have it.
type idOwner struct {
	uuids string
	since time.Time
}

// note takes what a look has shown that was over at a time, and completes it with IDSince.
func (ids *idOwners) note(pci string, instances []gpu.Instance, over time.Time) {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	if ids.gpus == nil {
		ids.gpus = map[string]*idsOfGPU{}
	}
	g := ids.gpus[pci]
	if g == nil {
		g = &idsOfGPU{looked: over, owners: map[int]idOwner{}}
		ids.gpus[pci] = g
	}
	now := map[int]string{}
	for _, i := range instances {
		for _, c := range i.Compute {
			now[i.ID] += c.UUID + " "
		}
		if _, seen := g.owners[i.ID]; !seen {
			g.owners[i.ID] = idOwner{since: g.looked}
		}
	}
	for id, o := range g.owners {
		if o.uuids != "" && o.uuids != now[id] {
			o.since = over
		}
		o.uuids = now[id]
		g.owners[id] = o
	}
	for i := range instances {
		if id := instances[i].ID; now[id] != "" { // no program can be on one without compute instances
			instances[i].IDSince = g.owners[id].since
		}
	}
}
