// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/generation"
)

// pool has all slices of a pool, of all generations: which count is for the allocator to say.
type pool struct {
	// slices are sorted by name, as the allocator sorts them.
	slices []*resourceapi.ResourceSlice
	// nodes are the names in the slices; "" is among them if a slice has none.
	nodes []string
	// devices are the contents of each slice's devices.
	devices map[*resourceapi.ResourceSlice][]uint64
	// intact pools may be shown to the allocator in parts. In others something is wrong that
	// the allocator has to see.
	intact bool
}

func poolsOf(all []*resourceapi.ResourceSlice) map[poolID]*pool {
	pools := map[poolID]*pool{}
	for _, s := range all {
		id := poolID{s.Spec.Driver, s.Spec.Pool.Name}
		if pools[id] == nil {
			pools[id] = &pool{devices: map[*resourceapi.ResourceSlice][]uint64{}}
		}
		pools[id].slices = append(pools[id].slices, s)
	}
	contents := make([][]uint64, len(all))
	inParallel(len(all), func(n int) {
		for i := range all[n].Spec.Devices {
			contents[n] = append(contents[n], contentOf(all[n].Spec.Driver, &all[n].Spec.Devices[i]))
		}
	})
	for n, s := range all {
		pools[poolID{s.Spec.Driver, s.Spec.Pool.Name}].devices[s] = contents[n]
	}
	for _, p := range pools {
		slices.SortStableFunc(p.slices, func(a, b *resourceapi.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
		nodes := sets.New[string]()
		for _, s := range p.slices {
			nodes.Insert(ptr.Deref(s.Spec.NodeName, ""))
		}
		p.nodes = sets.List(nodes)
		p.intact = intact(p.slices)
	}
	return pools
}

// intact reports whether all slices are of one generation, no name occurs twice, and all
// counters that devices use are there.
func intact(pool []*resourceapi.ResourceSlice) bool {
	counters := map[string]map[string]resourceapi.Counter{}
	for _, s := range pool {
		if s.Spec.Pool.Generation != pool[0].Spec.Pool.Generation {
			return false
		}
		for _, set := range s.Spec.SharedCounters {
			if counters[set.Name] != nil {
				return false
			}
			counters[set.Name] = set.Counters
		}
	}
	names := sets.New[string]()
	for _, s := range pool {
		for _, d := range s.Spec.Devices {
			if names.Has(d.Name) || !countersExist(d.ConsumesCounters, counters) {
				return false
			}
			names.Insert(d.Name)
		}
	}
	return true
}

func countersExist(consumed []resourceapi.DeviceCounterConsumption, sets map[string]map[string]resourceapi.Counter) bool {
	for _, c := range consumed {
		for name := range c.Counters {
			if _, has := sets[c.CounterSet][name]; !has {
				return false
			}
		}
	}
	return true
}

func comparePools(a, b poolID) int {
	return cmp.Or(cmp.Compare(a.driver, b.driver), cmp.Compare(a.pool, b.pool))
}

// Pool is what a node sees of a pool: the slices of its newest generation.
type Pool struct {
	Driver, Name string
	Slices       []*resourceapi.ResourceSlice
	// Expected is how many slices the pool should have. With fewer the scheduler allocates
	// nothing of it.
	Expected int64
	// Invalid says that a name occurs twice, or a counter is not there: the scheduler allocates
	// nothing of it either.
	Invalid bool
}

// Incomplete reports whether slices are missing.
func (p *Pool) Incomplete() bool { return int64(len(p.Slices)) != p.Expected }

func (p *pool) newest(id poolID) Pool {
	current, _ := generation.Newest(p.slices)
	out := Pool{Driver: id.driver, Name: id.pool, Slices: current, Expected: current[0].Spec.Pool.ResourceSliceCount}
	out.Invalid = !out.Incomplete() && !intact(out.Slices)
	return out
}
