// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

const (
	tryFor = time.Second
	// mostKinds is how many kinds of nodes changes are tried on.
	mostKinds = 64
)

// try asks the allocator on which node claims fit under other circumstances, such that containers start with them. It stops at the first.
func (s *sight) try(ctx context.Context, p *allocation.Planner, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) (string, bool) {
	p = s.x.hasty(p)
	for _, n := range nodes {
		switch a := p.OnNode(ctx, n, claims); {
		case a.Verdict == allocation.Fits && len(foreseen(s, allocation.Allocated(claims, a.Results))) > 0:
		case a.Verdict != allocation.Refused:
			return n.Name, a.Verdict == allocation.Fits
		}
	}
	return "", false
}

// hasty returns a Planner that gives a hard search up.
func (x *Explainer) hasty(p *allocation.Planner) *allocation.Planner {
	return p.Within(min(x.tryFor, p.TimeLimit))
}

// places returns the nodes that changes are tried on.
func (s *sight) places() []*corev1.Node {
	var nodes []*corev1.Node
	for _, kind := range s.kinds() {
		nodes = append(nodes, kind[0])
	}
	return nodes[:min(len(nodes), mostKinds)]
}

// helper looks for what would help. All that it suggests the allocator has confirmed.
type helper struct {
	s     *sight
	nodes []*corev1.Node
	// empty is the cluster without claims where not even that would do, or nil.
	empty *allocation.Planner
}

func newHelper(ctx context.Context, s *sight) *helper {
	h := &helper{s: s, nodes: s.places()}
	empty := s.x.planner.Emptied()
	if _, fits := s.try(ctx, empty, h.nodes, s.wanted(nil)); !fits {
		h.empty, s.planned = empty, s.unstarted(ctx, empty)
	}
	return h
}

// suggest looks for changes that help, the smallest first.
func (h *helper) suggest(ctx context.Context) {
	for _, c := range h.s.claims {
		for _, a := range asksOf(c) {
			h.changes(ctx, a)
		}
		for i := range c.Spec.Devices.Constraints {
			other := c.DeepCopy()
			other.Spec.Devices.Constraints = slices.Delete(other.Spec.Devices.Constraints, i, i+1)
			if s, fits := h.fits(ctx, h.nodes, h.with(c, other)); fits {
				s.Kind = DropConstraint
				h.add(s, "without the constraint on %s of claim %s", fleet.Compared(&c.Spec.Devices.Constraints[i]), c.Name)
			}
		}
	}
	h.endings(ctx)
	h.otherNodes(ctx)
}

// add suggests something. A text that the suggestion has already comes last.
func (h *helper) add(s Suggestion, format string, a ...any) {
	s.Text = fmt.Sprintf(format, a...) + s.Text
	h.s.confirmed = append(h.s.confirmed, s)
}

// confirm suggests a change of a request if the allocator allocates everything after it, or would as soon as others have ended: what nothing
// can serve is to be corrected first.
func (h *helper) confirm(ctx context.Context, a ask, kind SuggestionKind, edit func(ask), format string, args ...any) bool {
	s, fits := h.fits(ctx, h.nodes, h.with(a.claim, a.changed(edit)))
	if !fits {
		return false
	}
	if len(h.s.claims) > 1 || len(asksOf(a.claim)) > 1 {
		s.Text = fmt.Sprintf(" (claim %s, request %s)", a.claim.Name, a.Name) + s.Text
	}
	s.Kind = kind
	h.add(s, format, args...)
	return true
}

// fits reports whether claims can be allocated, and on which node, or on which claims they wait then.
func (h *helper) fits(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) (Suggestion, bool) {
	node, fits := h.s.try(ctx, h.s.x.planner, nodes, claims)
	if fits || h.empty == nil {
		return Suggestion{Node: node}, fits
	}
	if node, fits = h.s.try(ctx, h.empty, nodes, claims); !fits {
		return Suggestion{}, false
	}
	on := nodes[slices.IndexFunc(nodes, func(n *corev1.Node) bool { return n.Name == node })]
	names := h.fewest(ctx, h.s.x.planner.ClaimsOn(node), on, claims)
	return Suggestion{Text: "; then it waits for " + claimsText(names), Claims: names}, true
}

// with returns all claims, one of them replaced.
func (h *helper) with(claim, other *resourceapi.ResourceClaim) []*resourceapi.ResourceClaim {
	claims := slices.Clone(h.s.wanted(nil))
	claims[slices.Index(claims, claim)] = other
	return claims
}

// endings suggests the end of the fewest claims after which everything fits.
func (h *helper) endings(ctx context.Context) {
	best := Suggestion{Kind: EndClaims}
	for _, n := range h.s.nodes {
		var claims []*resourceapi.ResourceClaim
		for _, one := range h.s.InTheWay {
			if one.Node == n.Name {
				claims = append(claims, one.claim)
			}
		}
		if len(claims) == 0 || ctx.Err() != nil {
			continue
		}
		if ended := h.fewest(ctx, claims, n, h.s.wanted(nil)); len(ended) > 0 && (best.Claims == nil || len(ended) < len(best.Claims)) {
			best.Claims, best.Node = ended, n.Name
		}
		if len(best.Claims) == 1 {
			break
		}
	}
	n := len(best.Claims)
	if n > 0 {
		best.Text = h.enoughFor(ctx, best.Claims)
	}
	switch n {
	case 0:
	case 1, 2:
		h.add(best, "when %s %s", claimsText(best.Claims), plural(n, "ends", "have ended"))
	default:
		h.add(best, "when these %s have ended", claimsText(best.Claims))
	}
}

// fewest names a smallest set of some claims after whose end others fit on a node or, of many claims, one of which none can be spared. It is
// empty if not even the end of all is enough.
func (h *helper) fewest(ctx context.Context, of []*resourceapi.ResourceClaim, node *corev1.Node, claims []*resourceapi.ResourceClaim) (names []string) {
	for _, c := range fewest(of, func(ended ...*resourceapi.ResourceClaim) bool {
		_, fits := h.s.try(ctx, h.s.x.planner.Without(ended...), []*corev1.Node{node}, claims)
		return fits
	}) {
		names = append(names, c.Namespace+"/"+c.Name)
	}
	return names
}

// mostPairs is among how many claims is looked for two that could end together.
const mostPairs = 12

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

func claimsText(names []string) string {
	switch len(names) {
	case 0:
		return "other claims to end"
	case 1, 2:
		return strings.Join(names, " and ")
	}
	return fmt.Sprintf("%d claims: %s", len(names), strings.Join(names, ", "))
}

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// otherNodes says how the pod could use nodes that it is kept from.
func (h *helper) otherNodes(ctx context.Context) {
	advised := sets.New[allocation.ObstacleKind]()
	slices.SortStableFunc(h.s.excluded, func(a, b exclusion) int { return cmp.Compare(len(a.obstacles), len(b.obstacles)) })
	for _, e := range h.s.excluded {
		kind := e.obstacles[0].Kind
		if len(e.obstacles) != 1 || advised.Has(kind) || advice[kind] == "" {
			continue
		}
		if s, fits := h.fits(ctx, []*corev1.Node{e.node}, h.s.wanted(nil)); fits {
			advised.Insert(kind)
			s.Kind, s.Node = ChangeNode, e.node.Name
			h.add(s, advice[kind], e.node.Name)
		}
	}
}

var advice = map[allocation.ObstacleKind]string{
	allocation.ByNodeName:      "without spec.nodeName, or with %s",
	allocation.ByCordon:        "after kubectl uncordon %s",
	allocation.ByNodeSelector:  "with a nodeSelector that node %s has",
	allocation.ByNodeAffinity:  "with a node affinity that node %s matches",
	allocation.ByNodeTaint:     "with a toleration of the taint of node %s in the pod",
	allocation.ByNodeResources: "with less CPU, memory or other resources asked for, on node %s",
}

// most is how many nodes are looked at for claims that could end.
const most = 16

// inTheWay finds the claims that have what the requests could use, on nodes where all could be met if nothing were taken.
func inTheWay(ctx context.Context, s *sight, j *judge) {
	nodes, left := 0, 0
	never := sets.New[string]()
	for _, a := range s.search(ctx, s.x.hasty(s.x.planner.Emptied()), s.nodes) {
		if a.Verdict == allocation.Refused {
			never.Insert(a.Node)
		}
	}
	for _, n := range slices.SortedFunc(slices.Values(s.nodes), func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) }) {
		if never.Has(n.Name) {
			continue
		} else if nodes == most {
			left++
		} else if on := holdersOn(ctx, s, j, n); len(on) > 0 {
			s.InTheWay = append(s.InTheWay, on...)
			nodes++
		}
	}
	if left > 0 {
		s.note("Who is in the way was not looked for on %d more nodes.", left)
	}
}

// holdersOn finds those on a node.
func holdersOn(ctx context.Context, s *sight, j *judge, n *corev1.Node) []Holder {
	byClaim := map[*resourceapi.ResourceClaim]sets.Set[string]{}
	add := func(p *allocation.Pool, device string) {
		for _, h := range j.planner.Held(p, device) {
			// The pod cannot wait for the end of what it needs itself.
			if slices.Contains(s.own, h.Claim) {
				continue
			}
			if byClaim[h.Claim] == nil {
				byClaim[h.Claim] = sets.New[string]()
			}
			byClaim[h.Claim].Insert(device)
		}
	}
	for _, a := range asksOf(s.wanted(nil)...) {
		for _, f := range enough(a, j.onNode(ctx, n, a)) {
			if len(f.causes) > 0 {
				add(f.Pool, f.Device.Name)
			}
			if slices.Contains(f.causes, CountersUsed) {
				for _, name := range j.rivals(f.Pool, f.Device) {
					add(f.Pool, name)
				}
			}
		}
	}
	var out []Holder
	for c, devices := range byClaim {
		h := Holder{Namespace: c.Namespace, Claim: c.Name, Node: n.Name, Devices: sets.List(devices), claim: c}
		for _, r := range c.Status.ReservedFor {
			h.Pods = append(h.Pods, r.Name)
		}
		if since := fleet.AllocatedAt(c); !since.IsZero() {
			h.Since, h.For = &since, &metav1.Duration{Duration: s.x.now.Sub(since.Time)}
		}
		out = append(out, h)
	}
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(len(a.Pods), len(b.Pods)), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Claim, b.Claim))
	})
	return out
}

// enough returns the devices that would do after claims have ended, if they are as many as are asked for. What something else rules out,
// too, would not do.
func enough(a ask, all []finding) []finding {
	could := slices.DeleteFunc(all, func(f finding) bool {
		return slices.ContainsFunc(f.causes, func(c Cause) bool { return c != Held && c != CapacityUsed && c != CountersUsed })
	})
	shared := func(f finding) bool { return ptr.Deref(f.Device.AllowMultipleAllocations, false) }
	if *a.Mode == resourceapi.DeviceAllocationModeExactCount && int64(len(could)) < *a.Count && !slices.ContainsFunc(could, shared) {
		return nil
	}
	return could
}

// rivals returns the devices that need counters of which too little is left for one.
func (j *judge) rivals(p *allocation.Pool, d *resourceapi.Device) []string {
	left, short := j.countersOf(p), map[string]sets.Set[string]{}
	for _, use := range d.ConsumesCounters {
		short[use.CounterSet] = sets.New[string]()
		for name, c := range use.Counters {
			if c.Value.MilliValue() > left[use.CounterSet][name] {
				short[use.CounterSet].Insert(name)
			}
		}
	}
	var out []string
	for _, s := range p.Slices {
		for i := range s.Spec.Devices {
			other := &s.Spec.Devices[i]
			if other.Name != d.Name && slices.ContainsFunc(other.ConsumesCounters, func(use resourceapi.DeviceCounterConsumption) bool {
				for name, c := range use.Counters {
					if short[use.CounterSet].Has(name) && !c.Value.IsZero() {
						return true
					}
				}
				return false
			}) {
				out = append(out, other.Name)
			}
		}
	}
	return out
}
