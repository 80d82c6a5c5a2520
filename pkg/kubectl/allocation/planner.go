// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// DefaultTimeLimit is how long the scheduler searches on one node unless it is configured
// differently (filterTimeout of the plugin DynamicResources).
const DefaultTimeLimit = 10 * time.Second

// compiledSelectors is how many CEL expressions are kept.
const compiledSelectors = 500

// Planner answers what the scheduler would allocate.
type Planner struct {
	snapshot    *fleet.Snapshot
	features    structured.Features
	assumptions []string
	timeLimit   time.Duration
	everything  bool
	classes     classes
	cel         *cel.Cache
	selectors   *selectorCache
	nodes       []*corev1.Node
	// unread are nodes of which no more than the name is known.
	unread sets.Set[string]

	// pools are all there are, onNode those with slices of a node only, and anywhere those
	// with slices that are not.
	pools    map[poolID]*pool
	onNode   map[string][]poolID
	anywhere []poolID
	// claims are those that hold devices.
	claims []*resourceapi.ResourceClaim
	// holders are those of each pool, and states what follows from them. Planners share both
	// with their copies, so neither is changed in place.
	holders map[poolID][]*resourceapi.ResourceClaim
	states  map[poolID]*state
}

type poolID struct{ driver, pool string }

// Option changes a Planner that is being made.
type Option func(*Planner)

// WithFeatures sets what the allocator supports, in place of what New derives of the Snapshot.
func WithFeatures(f structured.Features) Option {
	return func(p *Planner) { p.features, p.assumptions = f, nil }
}

// WithTimeLimit sets how long is searched on one node.
func WithTimeLimit(d time.Duration) Option { return func(p *Planner) { p.timeLimit = d } }

// WithEverything makes the Planner show all devices to the allocator, and search each node. It
// is slow, and for tests that compare.
func WithEverything() Option { return func(p *Planner) { p.everything = true } }

// New returns a Planner for what a Snapshot has: taint rules are applied to slices, and what
// claims hold is taken.
func New(s *fleet.Snapshot, options ...Option) *Planner {
	p := &Planner{
		snapshot: s, timeLimit: DefaultTimeLimit,
		classes: classesOf(s.Classes),
	}
	p.nodes, p.unread = nodesOf(s)
	p.features, p.assumptions = featuresOf(s)
	for _, o := range options {
		o(p)
	}
	p.cel = cel.NewCache(compiledSelectors, cel.Features{
		EnableConsumableCapacity: p.features.ConsumableCapacity, EnableListTypeAttributes: p.features.ListTypeAttributes,
	})
	p.selectors = newSelectorCache(p.cel)
	p.setSlices(withTaintRules(s.Slices, s.TaintRules, p.features))
	p.setClaims(s.Claims)
	return p
}

// Snapshot returns what the Planner was made of.
func (p *Planner) Snapshot() *fleet.Snapshot { return p.snapshot }

// Nodes returns the nodes of the Snapshot. Where nodes cannot be read, it returns those that slices
// name, without anything but the name.
func (p *Planner) Nodes() []*corev1.Node { return p.nodes }

// Unread reports whether no more than the name of a node is known: its labels, its taints and what
// it has may be anything.
func (p *Planner) Unread(n *corev1.Node) bool { return p.unread.Has(n.Name) }

// Features returns what the allocator is assumed to support.
func (p *Planner) Features() structured.Features { return p.features }

// Assumptions says in sentences what was assumed about the scheduler, for people.
func (p *Planner) Assumptions() []string { return p.assumptions }

// TimeLimit returns how long is searched on one node.
func (p *Planner) TimeLimit() time.Duration { return p.timeLimit }

// Class returns a DeviceClass, or nil.
func (p *Planner) Class(name string) *resourceapi.DeviceClass { return p.classes[name] }

// Claims returns those that hold devices.
func (p *Planner) Claims() []*resourceapi.ResourceClaim { return p.claims }

// ClaimsOn returns those that hold devices of the pools of a node, those with the fewest users first.
func (p *Planner) ClaimsOn(node string) []*resourceapi.ResourceClaim {
	held := sets.New[*resourceapi.ResourceClaim]()
	for _, id := range p.onNode[node] {
		held.Insert(p.holders[id]...)
	}
	on := slices.DeleteFunc(slices.Clone(p.claims), func(c *resourceapi.ResourceClaim) bool { return !held.Has(c) })
	slices.SortStableFunc(on, func(a, b *resourceapi.ResourceClaim) int {
		return len(a.Status.ReservedFor) - len(b.Status.ReservedFor)
	})
	return on
}

// Without returns a Planner for the time after these claims have ended.
func (p *Planner) Without(ended ...*resourceapi.ResourceClaim) *Planner {
	gone := sets.New(ended...)
	q := p.clone()
	q.claims = slices.DeleteFunc(slices.Clone(p.claims), gone.Has)
	q.changeHolders(ended, func(of []*resourceapi.ResourceClaim, c *resourceapi.ResourceClaim) []*resourceapi.ResourceClaim {
		return slices.DeleteFunc(slices.Clone(of), func(other *resourceapi.ResourceClaim) bool { return other == c })
	})
	return q
}

// WithTimeLimit returns a Planner that searches each node for so long.
func (p *Planner) WithTimeLimit(d time.Duration) *Planner {
	q := p.clone()
	q.timeLimit = d
	return q
}

func (p *Planner) clone() *Planner { q := *p; return &q }

// setSlices makes pools of slices.
func (p *Planner) setSlices(all []*resourceapi.ResourceSlice) {
	p.pools, p.onNode, p.anywhere = poolsOf(all), map[string][]poolID{}, nil
	for _, id := range sortedPools(maps.Keys(p.pools)) {
		for _, node := range p.pools[id].nodes {
			if node == "" {
				p.anywhere = append(p.anywhere, id)
				continue
			}
			p.onNode[node] = append(p.onNode[node], id)
		}
	}
}

// nodesOf returns the nodes of a Snapshot. Without the right to read nodes there are those that
// slices name; otherwise the slices of other nodes are left over from nodes that are gone.
func nodesOf(s *fleet.Snapshot) (nodes []*corev1.Node, unread sets.Set[string]) {
	unread = sets.New[string]()
	if !slices.ContainsFunc(s.Missing, func(m fleet.Missing) bool { return m.Resource == fleet.ResourceNodes }) {
		return slices.Clone(s.Nodes), unread
	}
	for _, slice := range s.Slices {
		if name := ptr.Deref(slice.Spec.NodeName, ""); name != "" && !unread.Has(name) {
			unread.Insert(name)
			nodes = append(nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
	}
	return nodes, unread
}

// classes are what the allocator looks classes up in.
type classes map[string]*resourceapi.DeviceClass

func classesOf(list []*resourceapi.DeviceClass) classes {
	c := classes{}
	for _, class := range list {
		c[class.Name] = class
	}
	return c
}

// List returns all classes.
func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	return slices.Collect(maps.Values(c)), nil
}

// Get returns one.
func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, has := c[name]; has {
		return class, nil
	}
	return nil, fmt.Errorf("read a class: %w", apierrors.NewNotFound(resourceapi.Resource("deviceclasses"), name))
}
