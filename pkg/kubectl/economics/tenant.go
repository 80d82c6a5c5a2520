// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"cmp"
	"slices"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// tenant is a claim on a GPU.
type tenant struct {
	key, namespace, name string
	devices              []string
	// part is its part of the GPU, as the other commands count it.
	part float64
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

// tenantsOf returns the claims on a GPU, sorted. Where they were promised more than there is, their parts are those of all together. Claims
// with admin access only watch.
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
			part := h.Part()
			t.part += part
			total += part
			if others := len(held) > 1; others {
				t.mps = t.mps || d.Type == fleet.TypeMPS
				t.timeSlice = t.timeSlice || d.Type == fleet.TypeTimeSlice
			}
		}
	}
	var tenants []*tenant
	for _, t := range byClaim {
		t.part /= max(1, total)
		tenants = append(tenants, t)
	}
	slices.SortFunc(tenants, func(a, b *tenant) int { return cmp.Compare(a.key, b.key) })
	return tenants
}

// shareRoom returns how many claims a GPU has room for as shares that are offered: of the whole
// GPU, or of as many partitions of a profile as fit.
func shareRoom(g *fleet.GPU) int {
	room := 0
	for _, s := range newModel(g).Shares {
		room = max(room, s.room(0))
	}
	return room
}
