// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// Matcher evaluates selectors, once for devices of equal content.
type Matcher struct {
	cluster *Cluster
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
func NewMatcher(c *Cluster) *Matcher { return &Matcher{cluster: c, known: map[matchKey]match{}} }

// Matches says what the allocator finds for an expression and a device.
func (m *Matcher) Matches(ctx context.Context, expression string, p Published) (bool, error) {
	d, driver := p.Device(), p.Pool.Driver
	static := m.cluster.pools[poolID{driver, p.Pool.Name}].devices[p.Slice][p.Index]
	return m.matches(ctx, expression, driver, d, static+identityIf(seesIdentities(expression), d))
}

// matches is about a device whose content stands for all that the expression looks at.
func (m *Matcher) matches(ctx context.Context, expression, driver string, d *resourceapi.Device, content uint64) (bool, error) {
	key := matchKey{expression, content}
	m.mu.Lock()
	defer m.mu.Unlock()
	if known, has := m.known[key]; has {
		return known.matches, known.err
	}
	matches, err := m.cluster.evaluate(ctx, expression, driver, d)
	m.known[key] = match{matches, err}
	return matches, err
}

// Kinds groups nodes that have the same devices, used in the same way. It is a guess that looks
// at names of attributes, for choosing what to look at.
func (p *Planner) Kinds(ctx context.Context, nodes []*corev1.Node) [][]*corev1.Node {
	q := newQuery(p, nil)
	q.whole = true
	var out [][]*corev1.Node
	for _, kind := range q.kinds(ctx, nodes) {
		var all []*corev1.Node
		for _, i := range kind.nodes {
			all = append(all, nodes[i])
		}
		out = append(out, all)
	}
	return out
}
