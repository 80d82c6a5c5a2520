// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
)

// most is how many nodes are looked at for claims that could end, and mostPairs how many claims
// of a node for two that could end together.
const (
	most      = 16
	mostPairs = 12
)

type deviceName struct{ driver, pool, device string }

// holding is a claim and what it has on a node.
type holding struct {
	claim   *resourceapi.ResourceClaim
	devices sets.Set[string]
}

// inTheWay finds the claims that have what the requests could use.
func (q *inquiry) inTheWay(ctx context.Context, j *judge) {
	byDevice := map[deviceName][]*resourceapi.ResourceClaim{}
	for _, c := range q.planner.Claims() {
		// The pod cannot wait for the end of what it needs itself.
		if slices.Contains(q.own, c) {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if !ptr.Deref(r.AdminAccess, false) {
				d := deviceName{r.Driver, r.Pool, r.Device}
				byDevice[d] = append(byDevice[d], c)
			}
		}
	}
	q.holdings = map[string][]*holding{}
	left := 0
	for _, n := range q.nodes {
		if len(q.holdings) == most {
			left++
			continue
		}
		if found := q.holdingsOn(ctx, j, n, byDevice); len(found) > 0 {
			q.holdings[n.Name] = found
		}
	}
	if left > 0 {
		q.Notes = append(q.Notes, fmt.Sprintf("Who is in the way was not looked for on %d more nodes.", left))
	}
	for _, node := range sets.List(sets.KeySet(q.holdings)) {
		for _, h := range q.holdings[node] {
			q.InTheWay = append(q.InTheWay, q.holder(h, node))
		}
	}
}

func (q *inquiry) holdingsOn(ctx context.Context, j *judge, n *corev1.Node, byDevice map[deviceName][]*resourceapi.ResourceClaim) []*holding {
	found := map[*resourceapi.ResourceClaim]*holding{}
	add := func(d deviceName) {
		for _, c := range byDevice[d] {
			if found[c] == nil {
				found[c] = &holding{c, sets.New[string]()}
			}
			found[c].devices.Insert(d.device)
		}
	}
	for _, c := range q.allClaims() {
		for _, a := range asksOf(c) {
			for _, f := range j.onNode(ctx, n, a) {
				switch f.cause() {
				case Held, CapacityUsed:
					add(deviceName{f.pool.Driver, f.pool.Name, f.device.Name})
				}
				if slices.Contains(f.causes, CountersUsed) {
					for _, name := range neighbours(f.pool, f.device) {
						add(deviceName{f.pool.Driver, f.pool.Name, name})
					}
				}
			}
		}
	}
	var out []*holding
	for _, h := range found {
		out = append(out, h)
	}
	slices.SortFunc(out, func(a, b *holding) int {
		return cmp.Or(cmp.Compare(len(a.claim.Status.ReservedFor), len(b.claim.Status.ReservedFor)),
			cmp.Compare(a.claim.Namespace, b.claim.Namespace), cmp.Compare(a.claim.Name, b.claim.Name))
	})
	return out
}

// neighbours returns the devices that need the same counters as one.
func neighbours(p *allocation.Pool, d *resourceapi.Device) []string {
	var out []string
	for _, s := range p.Slices {
		for i := range s.Spec.Devices {
			other := &s.Spec.Devices[i]
			if other.Name != d.Name && overlap(d, other) {
				out = append(out, other.Name)
			}
		}
	}
	return out
}

func overlap(a, b *resourceapi.Device) bool {
	for _, x := range a.ConsumesCounters {
		for _, y := range b.ConsumesCounters {
			if x.CounterSet != y.CounterSet {
				continue
			}
			for name, c := range x.Counters {
				if o, has := y.Counters[name]; has && !c.Value.IsZero() && !o.Value.IsZero() {
					return true
				}
			}
		}
	}
	return false
}

func (q *inquiry) holder(h *holding, node string) Holder {
	c := h.claim
	out := Holder{Namespace: c.Namespace, Claim: c.Name, Node: node, Devices: sets.List(h.devices)}
	for _, r := range c.Status.ReservedFor {
		out.Pods = append(out.Pods, r.Name)
	}
	since := c.CreationTimestamp
	if t := c.Status.Allocation.AllocationTimestamp; t != nil {
		since = *t
	}
	if !since.IsZero() {
		out.Since, out.For = &since, &metav1.Duration{Duration: q.now.Sub(since.Time)}
	}
	return out
}

// endings returns the fewest claims after whose end everything fits, and the node.
func (q *inquiry) endings(ctx context.Context) ([]*resourceapi.ResourceClaim, string) {
	var best []*resourceapi.ResourceClaim
	on := ""
	for _, n := range q.nodes {
		held := q.holdings[n.Name]
		if len(held) == 0 || ctx.Err() != nil {
			continue
		}
		var claims []*resourceapi.ResourceClaim
		for _, h := range held {
			claims = append(claims, h.claim)
		}
		fits := func(ended ...*resourceapi.ResourceClaim) bool {
			_, ok := q.try(ctx, q.planner.Without(ended...), []*corev1.Node{n}, q.allClaims())
			return ok
		}
		if set := fewest(claims, fits); set != nil && (best == nil || len(set) < len(best)) {
			best, on = set, n.Name
		}
		if len(best) == 1 {
			break
		}
	}
	return best, on
}

// fewest returns a smallest set of claims after whose end it fits or, of many claims, one of
// which none can be spared. It is nil if not even the end of all is enough.
func fewest(claims []*resourceapi.ResourceClaim, fits func(...*resourceapi.ResourceClaim) bool) []*resourceapi.ResourceClaim {
	if !fits(claims...) {
		return nil
	}
	for _, c := range claims {
		if fits(c) {
			return []*resourceapi.ResourceClaim{c}
		}
	}
	if len(claims) <= mostPairs {
		for i, c := range claims {
			for _, d := range claims[i+1:] {
				if fits(c, d) {
					return []*resourceapi.ResourceClaim{c, d}
				}
			}
		}
	}
	set := slices.Clone(claims)
	for i := len(set) - 1; i >= 0; i-- {
		if without := slices.Delete(slices.Clone(set), i, i+1); fits(without...) {
			set = without
		}
	}
	return set
}

// holding returns the fewest claims of a node that have to end before others fit there.
func (q *inquiry) holding(ctx context.Context, node string, claims []*resourceapi.ResourceClaim) []string {
	var on []*corev1.Node
	for _, n := range q.nodes {
		if n.Name == node {
			on = append(on, n)
		}
	}
	var names []string
	for _, c := range fewest(q.planner.ClaimsOn(node), func(ended ...*resourceapi.ResourceClaim) bool {
		_, fits := q.try(ctx, q.planner.Without(ended...), on, claims)
		return fits
	}) {
		names = append(names, c.Namespace+"/"+c.Name)
	}
	return names
}

func claimsText(names []string) string {
	switch len(names) {
	case 0:
		return "other claims to end"
	case 1, 2:
		return strings.Join(names, " and ")
	}
	return fmt.Sprintf("%d claims: %s", len(names), strings.Join(names, ", "))
}
