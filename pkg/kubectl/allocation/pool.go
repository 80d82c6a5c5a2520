// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/generation"
)

type poolID struct{ driver, pool string }

func comparePools(a, b poolID) int {
	return cmp.Or(cmp.Compare(a.driver, b.driver), cmp.Compare(a.pool, b.pool))
}

// Pool is what the scheduler sees of a pool: the slices of its newest generation.
type Pool struct {
	Driver, Name string
	Slices       []*resourceapi.ResourceSlice
	// Invalid says that a name occurs twice, or a counter is not there: the scheduler allocates
	// nothing of it.
	Invalid bool

	// all are the slices of all generations, sorted by name, as the allocator sorts them: which count is for the allocator to say.
	all []*resourceapi.ResourceSlice
	// contents are those of each slice's devices.
	contents map[*resourceapi.ResourceSlice][]uint64
}

// Expected is how many slices the pool should have.
func (p *Pool) Expected() int64 { return p.Slices[0].Spec.Pool.ResourceSliceCount }

// Incomplete reports whether slices are missing: the scheduler allocates nothing of the pool then.
func (p *Pool) Incomplete() bool { return int64(len(p.Slices)) != p.Expected() }

func poolsOf(s *fleet.Snapshot) map[poolID]*Pool {
	pools := map[poolID]*Pool{}
	all := s.Slices
	if len(s.TaintRules) > 0 {
		all = make([]*resourceapi.ResourceSlice, len(s.Slices))
		for i := range all {
			all[i] = tainted(s.Slices[i], s.TaintRules)
		}
	}
	for _, s := range all {
		id := poolID{s.Spec.Driver, s.Spec.Pool.Name}
		if pools[id] == nil {
			pools[id] = &Pool{Driver: id.driver, Name: id.pool, contents: map[*resourceapi.ResourceSlice][]uint64{}}
		}
		pools[id].all = append(pools[id].all, s)
	}
	contents := make([][]uint64, len(all))
	inParallel(len(all), func(n int) {
		for i := range all[n].Spec.Devices {
			contents[n] = append(contents[n], contentOf(all[n].Spec.Driver, &all[n].Spec.Devices[i]))
		}
	})
	for n, s := range all {
		pools[poolID{s.Spec.Driver, s.Spec.Pool.Name}].contents[s] = contents[n]
	}
	for _, p := range pools {
		slices.SortStableFunc(p.all, func(a, b *resourceapi.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
		p.Slices, _ = generation.Newest(p.all)
		p.Invalid = !p.Incomplete() && !valid(p.Slices)
	}
	return pools
}

// tainted returns a slice with the taints that rules give to its devices, as the scheduler sees it. One that no rule concerns stays as it is.
func tainted(s *resourceapi.ResourceSlice, rules []*resourceapi.DeviceTaintRule) *resourceapi.ResourceSlice {
	patched := s
	for _, rule := range rules {
		for i := range s.Spec.Devices {
			if !fleet.RuleCovers(rule, s.Spec.Driver, s.Spec.Pool.Name, s.Spec.Devices[i].Name) {
				continue
			}
			if patched == s {
				c := *s
				c.Spec.Devices = slices.Clone(s.Spec.Devices)
				patched = &c
			}
			d := &patched.Spec.Devices[i]
			d.Taints = append(slices.Clip(d.Taints), rule.Spec.Taint)
		}
	}
	return patched
}

// valid reports whether no name occurs twice, and all counters that devices use are there.
func valid(pool []*resourceapi.ResourceSlice) bool {
	counters, names := fleet.CountersOf(pool), sets.New[string]()
	for _, s := range pool {
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			if names.Has(d.Name) || !counters.Fit(d) {
				return false
			}
			names.Insert(d.Name)
		}
	}
	return true
}
