// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"cmp"
	"slices"

	"github.com/partage-dev/partage/pkg/kubectl/economics"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// tenant is a claim on a GPU.
type tenant struct {
	key, namespace, name string
	devices              []string
	// weight is what it has, in bytes of memory, and part is its part of all that claims have
	// of the GPU.
	weight, part float64
	// mps and timeSlice say that it shares a device with other claims.
	mps, timeSlice bool
}

// overhead returns by how many percent sharing slows its work.
func (t *tenant) overhead(o Overheads) float64 {
	switch {
	case t.timeSlice:
		return o.TimeSlice
	case t.mps:
		return o.MPS
	}
	return 0
}

// tenantsOf returns the claims on a GPU, sorted. They pay for all of it, whatever is free: each
// its part of what they have together. Claims with admin access only watch.
func tenantsOf(g *fleet.GPU) []*tenant {
	byClaim := map[string]*tenant{}
	total := 0.0
	for _, d := range g.Devices {
		held := d.Held()
		for _, h := range held {
			key := h.Claim.Namespace + "/" + h.Claim.Name
			t := byClaim[key]
			if t == nil {
				t = &tenant{key: key, namespace: h.Claim.Namespace, name: h.Claim.Name}
				byClaim[key] = t
			}
			t.devices = append(t.devices, d.Name)
			w := weight(d, h, held)
			t.weight += w
			total += w
			if others := len(held) > 1; others {
				t.mps = t.mps || d.Type == fleet.TypeMPS
				t.timeSlice = t.timeSlice || d.Type == fleet.TypeTimeSlice
			}
		}
	}
	var tenants []*tenant
	for _, t := range byClaim {
		t.part = t.weight / total
		tenants = append(tenants, t)
	}
	slices.SortFunc(tenants, func(a, b *tenant) int { return cmp.Compare(a.key, b.key) })
	return tenants
}

// weight returns what a claim has of a device: its memory. Those who share one divide its memory
// as they have asked for it, or equally where one of them has asked for none.
func weight(d *fleet.Device, h *fleet.Holding, held []*fleet.Holding) float64 {
	memory := d.Published.Capacity[fleet.CapacityMemory]
	all := float64(max(1, memory.Value.Value()))
	if !d.Shared() {
		return all
	}
	together := 0.0
	for _, other := range held {
		c := consumed(other)
		if c <= 0 {
			return all / float64(len(held))
		}
		together += c
	}
	return all * consumed(h) / together
}

func consumed(h *fleet.Holding) float64 {
	q := h.Result.ConsumedCapacity[fleet.CapacityMemory]
	return float64(q.Value())
}

// shareRoom returns how many claims a GPU has room for as shares that are offered: of the whole
// GPU, or of as many partitions of a profile as fit.
func shareRoom(g *fleet.GPU) int {
	alike := map[string][]*fleet.Device{}
	for _, d := range g.Devices {
		if d.Shared() {
			alike[d.Type+d.Profile] = append(alike[d.Type+d.Profile], d)
		}
	}
	room := 0
	for _, devices := range alike {
		clients := devices[0].Published.Capacity[fleet.CapacityShares]
		room = max(room, economics.SharedCapacity(g.Most(devices), int(clients.Value.Value())))
	}
	return room
}
