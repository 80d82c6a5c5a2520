// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"context"
	"encoding/binary"
	"hash/maphash"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// query is about one list of claims on any number of nodes.
type query struct {
	planner *Planner
	cluster *Cluster
	claims  []*resourceapi.ResourceClaim
	// alternatives are the selectors of each request and subrequest: all expressions of one
	// have to be true.
	alternatives [][]string
	// identities means that a selector may tell devices of one kind apart.
	identities bool
	// constraints are the attributes that claims compare devices by.
	constraints []string
	// whole means that nothing is known about what is selected: the allocator has to see it all.
	whole   bool
	matcher *Matcher
}

func newQuery(p *Planner, claims []*resourceapi.ResourceClaim) *query {
	q := &query{planner: p, cluster: p.Cluster, claims: claims, whole: p.everything, matcher: NewMatcher(p.Cluster)}
	for _, c := range claims {
		for i := range c.Spec.Devices.Requests {
			q.addRequest(&c.Spec.Devices.Requests[i])
		}
		for _, constraint := range c.Spec.Devices.Constraints {
			for _, name := range []*resourceapi.FullyQualifiedName{constraint.MatchAttribute, constraint.DistinctAttribute} {
				if name != nil {
					q.constraints = append(q.constraints, string(*name))
				}
			}
		}
	}
	return q
}

func (q *query) addRequest(r *resourceapi.DeviceRequest) {
	if r.Exactly != nil {
		q.addAlternative(r.Exactly.DeviceClassName, r.Exactly.Selectors)
		q.whole = q.whole || len(r.Exactly.DerivedAttributes) > 0
	}
	for _, sub := range r.FirstAvailable {
		q.addAlternative(sub.DeviceClassName, sub.Selectors)
		q.whole = q.whole || len(sub.DerivedAttributes) > 0
	}
}

func (q *query) addAlternative(className string, selectors []resourceapi.DeviceSelector) {
	class := q.cluster.classes[className]
	if class == nil {
		q.whole = true
		return
	}
	var expressions []string
	for _, s := range slices.Concat(class.Spec.Selectors, selectors) {
		if s.CEL == nil {
			q.whole = true
			return
		}
		q.identities = q.identities || seesIdentities(s.CEL.Expression)
		expressions = append(expressions, s.CEL.Expression)
	}
	q.alternatives = append(q.alternatives, expressions)
}

// part is what the allocator sees of the cluster on one node.
type part struct {
	node   *corev1.Node
	pools  []poolID
	slices []*resourceapi.ResourceSlice
	// key is equal for nodes where the allocator's answer must be the same.
	key uint64
}

// part returns what matters on a node.
func (q *query) part(ctx context.Context, node *corev1.Node) *part {
	out := &part{node: node, pools: q.cluster.poolsOn(node.Name)}
	w := &keyWriter{}
	w.h.SetSeed(seed)
	if q.planner.everything {
		w.text(node.Name)
	}
	ordinals := map[uint64]uint64{}
	for _, id := range out.pools {
		w.text("pool", id.driver)
		q.addPool(ctx, out, w, id, ordinals)
	}
	out.key = w.h.Sum64()
	return out
}

func (q *query) addPool(ctx context.Context, out *part, w *keyWriter, id poolID, ordinals map[uint64]uint64) {
	p, held := q.cluster.pools[id], q.planner.held.states[id]
	sets := map[string]uint64{}
	for _, s := range p.slices {
		for _, set := range s.Spec.SharedCounters {
			sets[set.Name] = uint64(len(sets) + 1)
		}
	}
	for _, s := range p.slices {
		w.number(uint64(s.Spec.Pool.ResourceSliceCount))
		if !p.intact {
			w.number(uint64(s.Spec.Pool.Generation))
			w.text(id.pool)
		}
		q.writeNode(w, s, out.node)
		for _, set := range s.Spec.SharedCounters {
			w.number(sets[set.Name], hashOf("", &resourceapi.CounterSet{Counters: set.Counters}))
		}
		kept := s
		if p.intact && !q.whole {
			c := *s
			c.Spec.Devices = nil
			kept = &c
		}
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			content := p.devices[s][i] + identityIf(q.identities, d)
			if kept != s {
				if !held.holds(d.Name) && !q.mayBeSelected(ctx, id.driver, d, content) {
					continue
				}
				kept.Spec.Devices = append(kept.Spec.Devices, *d)
			}
			w.number(content)
			for _, c := range d.ConsumesCounters {
				w.number(sets[c.CounterSet])
			}
			q.writeConstraints(w, id.driver, d, ordinals)
			writeState(w, held, d.Name)
		}
		out.slices = append(out.slices, kept)
	}
}

// writeNode tells nodes apart that a slice treats differently.
func (q *query) writeNode(w *keyWriter, s *resourceapi.ResourceSlice, node *corev1.Node) {
	if name := ptr.Deref(s.Spec.NodeName, ""); name != "" {
		w.truth(name == node.Name)
		return
	}
	matches, err := structured.NodeMatches(q.cluster.Features, node, "", ptr.Deref(s.Spec.AllNodes, false), s.Spec.NodeSelector)
	if err != nil || ptr.Deref(s.Spec.PerDeviceNodeSelection, false) {
		w.text(node.Name)
		return
	}
	w.truth(matches)
	// The pool is the same on all nodes.
	w.text(s.Spec.Driver, s.Spec.Pool.Name)
}

// writeConstraints writes which devices of a node have the same value, not the value.
func (q *query) writeConstraints(w *keyWriter, driver string, d *resourceapi.Device, ordinals map[uint64]uint64) {
	for _, name := range q.constraints {
		a, has := Attribute(d, driver, name)
		if !has {
			w.number(0)
			continue
		}
		value := hashOf(name, &a)
		if a.IntValues != nil || a.BoolValues != nil || a.StringValues != nil || a.VersionValues != nil {
			// Lists are compared by what they have in common.
			w.number(value)
		}
		if ordinals[value] == 0 {
			ordinals[value] = uint64(len(ordinals) + 1)
		}
		w.number(ordinals[value])
	}
}

func writeState(w *keyWriter, s *state, device string) {
	if !s.holds(device) {
		w.number(0)
		return
	}
	w.truth(s.alone.Has(device))
	w.number(uint64(len(s.shared[device])))
	var sum uint64
	for _, r := range s.shared[device] {
		for name, q := range r.ConsumedCapacity {
			sum += hashOf(string(name), &q)
		}
	}
	w.number(sum)
}

// mayBeSelected reports whether a request could select a device. Whatever is not a plain no
// counts as yes: an error is for the allocator to find.
func (q *query) mayBeSelected(ctx context.Context, driver string, d *resourceapi.Device, content uint64) bool {
	return slices.ContainsFunc(q.alternatives, func(expressions []string) bool {
		for _, e := range expressions {
			if matches, err := q.matcher.matches(ctx, e, driver, d, content); err != nil || !matches {
				return err != nil
			}
		}
		return true
	})
}

// Attribute returns an attribute by its fully qualified name. A name in a slice without domain
// is in the driver's.
func Attribute(d *resourceapi.Device, driver, name string) (resourceapi.DeviceAttribute, bool) {
	if a, has := d.Attributes[resourceapi.QualifiedName(name)]; has {
		return a, true
	}
	if id := identifier(name); name == driver+"/"+id {
		a, has := d.Attributes[resourceapi.QualifiedName(id)]
		return a, has
	}
	return resourceapi.DeviceAttribute{}, false
}

// keyWriter makes a key.
type keyWriter struct{ h maphash.Hash }

func (w *keyWriter) number(all ...uint64) {
	var b [8]byte
	for _, n := range all {
		binary.LittleEndian.PutUint64(b[:], n)
		w.h.Write(b[:])
	}
}

func (w *keyWriter) text(all ...string) {
	for _, s := range all {
		w.number(uint64(len(s)))
		w.h.WriteString(s)
	}
}

func (w *keyWriter) truth(b bool) {
	if b {
		w.number(1)
		return
	}
	w.number(2)
}
