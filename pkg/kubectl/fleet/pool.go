// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// pool are the slices of a pool's newest generation.
type pool struct {
	name       string
	generation int64
	slices     []*resourceapi.ResourceSlice
	complete   bool
}

// poolsOf returns the pools of a driver, by name.
func poolsOf(all []*resourceapi.ResourceSlice, driver string) []*pool {
	byName := map[string]*pool{}
	for _, s := range all {
		if s.Spec.Driver != driver {
			continue
		}
		name, generation := s.Spec.Pool.Name, s.Spec.Pool.Generation
		p := byName[name]
		if p == nil || p.generation < generation {
			p = &pool{name: name, generation: generation}
			byName[name] = p
		}
		if p.generation == generation {
			p.slices = append(p.slices, s)
		}
	}
	var pools []*pool
	for _, p := range byName {
		p.complete = int64(len(p.slices)) == p.slices[0].Spec.Pool.ResourceSliceCount
		pools = append(pools, p)
	}
	slices.SortFunc(pools, func(a, b *pool) int { return cmp.Compare(a.name, b.name) })
	return pools
}
