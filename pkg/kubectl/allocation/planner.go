// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// DefaultTimeLimit is how long the scheduler searches on one node unless it is configured
// differently (filterTimeout of the plugin DynamicResources).
const DefaultTimeLimit = 10 * time.Second

// Planner answers what the scheduler would allocate.
type Planner struct {
	// Cluster is what there is to allocate.
	Cluster *Cluster
	// TimeLimit is how long is searched on one node.
	TimeLimit  time.Duration
	everything bool
	held       *holders
}

type poolID struct{ driver, pool string }

// Option changes a Planner that is being made.
type Option func(*Planner)

// WithTimeLimit sets how long is searched on one node.
func WithTimeLimit(d time.Duration) Option { return func(p *Planner) { p.TimeLimit = d } }

// WithEverything makes the Planner show all devices to the allocator, and search each node. It
// is slow, and for tests that compare.
func WithEverything() Option { return func(p *Planner) { p.everything = true } }

// New returns a Planner for what a Snapshot has: taint rules are applied to slices, and what
// claims hold is taken.
func New(s *fleet.Snapshot, options ...Option) *Planner {
	p := &Planner{TimeLimit: DefaultTimeLimit, Cluster: newCluster(s)}
	p.held = holdersOf(s.Claims, p.Cluster.Features)
	for _, o := range options {
		o(p)
	}
	return p
}

// Claims returns those that hold devices.
func (p *Planner) Claims() []*resourceapi.ResourceClaim { return p.held.claims }

// ClaimsOn returns those that hold devices of the pools of a node, those with the fewest users first.
func (p *Planner) ClaimsOn(node string) []*resourceapi.ResourceClaim {
	held := sets.New[*resourceapi.ResourceClaim]()
	for _, id := range p.Cluster.onNode[node] {
		held.Insert(p.held.ofPool[id]...)
	}
	on := slices.DeleteFunc(slices.Clone(p.held.claims), func(c *resourceapi.ResourceClaim) bool { return !held.Has(c) })
	slices.SortStableFunc(on, func(a, b *resourceapi.ResourceClaim) int {
		return len(a.Status.ReservedFor) - len(b.Status.ReservedFor)
	})
	return on
}

// Without returns a Planner for the time after these claims have ended.
func (p *Planner) Without(ended ...*resourceapi.ResourceClaim) *Planner {
	q := *p
	q.held = p.held.without(ended)
	return &q
}

// HeldAlone reports whether a claim has a device for itself.
func (p *Planner) HeldAlone(driver, pool, device string) bool {
	s := p.held.states[poolID{driver, pool}]
	return s != nil && s.alone.Has(device)
}

// Shares returns what claims have of a device that is shared.
func (p *Planner) Shares(driver, pool, device string) []*resourceapi.DeviceRequestAllocationResult {
	if s := p.held.states[poolID{driver, pool}]; s != nil {
		return s.shared[device]
	}
	return nil
}
