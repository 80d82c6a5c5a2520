// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"context"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

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

// PoolsOn returns the pools that have devices for a node, by driver and name.
func (p *Planner) PoolsOn(node string) []Pool {
	ids := slices.Concat(p.onNode[node], p.anywhere)
	slices.SortFunc(ids, comparePools)
	var out []Pool
	for _, id := range slices.Compact(ids) {
		out = append(out, p.pools[id].newest(id))
	}
	return out
}

// Reaches says which devices of a slice are there for a node: all, none, or those whose own node
// selection has it.
func (p *Planner) Reaches(s *resourceapi.ResourceSlice, node *corev1.Node) func(*resourceapi.Device) bool {
	if !ptr.Deref(s.Spec.PerDeviceNodeSelection, false) {
		reaches := p.matches(node, s.Spec.NodeName, s.Spec.AllNodes, s.Spec.NodeSelector)
		return func(*resourceapi.Device) bool { return reaches }
	}
	return func(d *resourceapi.Device) bool { return p.matches(node, d.NodeName, d.AllNodes, d.NodeSelector) }
}

// matches takes a selector that is invalid for one that has no node: saying so is the allocator's.
func (p *Planner) matches(node *corev1.Node, name *string, all *bool, selector *corev1.NodeSelector) bool {
	matches, err := structured.NodeMatches(p.features, node, ptr.Deref(name, ""), ptr.Deref(all, false), selector)
	return err == nil && matches
}

func (p *pool) newest(id poolID) Pool {
	out := Pool{Driver: id.driver, Name: id.pool}
	generation := int64(-1)
	for _, s := range p.slices {
		if s.Spec.Pool.Generation > generation {
			generation, out.Slices, out.Expected = s.Spec.Pool.Generation, nil, s.Spec.Pool.ResourceSliceCount
		}
		if s.Spec.Pool.Generation == generation {
			out.Slices = append(out.Slices, s)
		}
	}
	out.Invalid = !out.Incomplete() && !intact(out.Slices)
	return out
}

// HeldAlone reports whether a claim has a device for itself.
func (p *Planner) HeldAlone(driver, pool, device string) bool {
	s := p.states[poolID{driver, pool}]
	return s != nil && s.alone.Has(device)
}

// Shares returns what claims have of a device that is shared.
func (p *Planner) Shares(driver, pool, device string) []*resourceapi.DeviceRequestAllocationResult {
	if s := p.states[poolID{driver, pool}]; s != nil {
		return s.shared[device]
	}
	return nil
}

// Matcher evaluates selectors, once for devices of equal content.
type Matcher struct {
	planner *Planner
	mu      sync.Mutex
	known   map[matchKey]match
}

type matchKey struct {
	expression string
	content    uint64
}

type match struct {
	matches bool
	err     error
}

// NewMatcher returns a Matcher without any results.
func (p *Planner) NewMatcher() *Matcher { return &Matcher{planner: p, known: map[matchKey]match{}} }

// Matches says what the allocator finds for an expression and the device of a slice.
func (m *Matcher) Matches(ctx context.Context, expression string, s *resourceapi.ResourceSlice, device int) (bool, error) {
	d := &s.Spec.Devices[device]
	var static deviceContent
	if contents := m.planner.pools[poolID{s.Spec.Driver, s.Spec.Pool.Name}].devices[s]; contents != nil {
		static = contents[device]
	}
	key := matchKey{expression, contentWith(s.Spec.Driver, d, static, m.planner.selectors.attributesOf(expression))}
	m.mu.Lock()
	defer m.mu.Unlock()
	if known, has := m.known[key]; has {
		return known.matches, known.err
	}
	matches, err := m.planner.evaluate(ctx, expression, s.Spec.Driver, d)
	m.known[key] = match{matches, err}
	return matches, err
}

// identities are attributes that tell devices of one kind apart.
var identities = sets.New("uuid", "parentUUID", "pciBusID", "pcieRoot", "serial", "minor", "index", "numaNode", "nvlinkDomain", "pcieSwitch")

// Kinds groups nodes that have the same devices, used in the same way. It is a guess that looks
// at names of attributes, for choosing what to look at.
func (p *Planner) Kinds(ctx context.Context, nodes []*corev1.Node) [][]*corev1.Node {
	q := p.newQuery(nil)
	q.whole = true
	q.attributes = attributes{all: true, except: identities}
	keys := make([]uint64, len(nodes))
	inParallel(len(nodes), func(i int) { keys[i] = q.part(ctx, nodes[i]).key })
	place := map[uint64]int{}
	var out [][]*corev1.Node
	for i, n := range nodes {
		key := keys[i]
		if kind, known := place[key]; known {
			out[kind] = append(out[kind], n)
			continue
		}
		place[key] = len(out)
		out = append(out, []*corev1.Node{n})
	}
	return out
}
