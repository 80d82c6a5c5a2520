// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

const (
	tryFor = time.Second
	// mostKinds is how many kinds of nodes changes are tried on, mostValues how many values are
	// suggested in place of one, and mostTries how many amounts are tried.
	mostKinds  = 64
	mostValues = 3
	mostTries  = 8
)

// try asks the allocator where claims fit under other circumstances.
func (q *inquiry) try(ctx context.Context, p *allocation.Planner, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) (string, bool) {
	a, fits := p.WithTimeLimit(min(q.tryFor, p.TimeLimit())).Anywhere(ctx, nodes, claims)
	return a.Node, fits
}

// places returns the nodes that changes are tried on.
func (q *inquiry) places() []*corev1.Node {
	var nodes []*corev1.Node
	for _, kind := range q.eligible() {
		nodes = append(nodes, kind[0])
	}
	return nodes[:min(len(nodes), mostKinds)]
}

// suggest looks for changes that help, the smallest first.
func (q *inquiry) suggest(ctx context.Context) {
	nodes := q.places()
	empty := q.planner.Without(q.planner.Claims()...)
	if _, fits := q.try(ctx, empty, nodes, q.allClaims()); fits {
		empty = nil
	}
	for _, c := range q.claims {
		for _, a := range asksOf(c) {
			t := trial{inquiry: q, ask: a, nodes: nodes, empty: empty}
			t.values(ctx)
			t.memory(ctx)
			t.capacities(ctx)
			t.count(ctx)
			t.selectors(ctx)
			t.tolerations(ctx)
		}
		q.constraints(ctx, c, nodes)
	}
	if ended, node := q.endings(ctx); len(ended) > 0 {
		s := Suggestion{Kind: EndClaims, Node: node}
		for _, c := range ended {
			s.Claims = append(s.Claims, c.Namespace+"/"+c.Name)
		}
		s.Text = fmt.Sprintf("when %s %s", strings.Join(s.Claims, " and "), plural(len(ended), "ends", "have ended"))
		if len(ended) > 2 {
			s.Text = fmt.Sprintf("when these %s have ended", claimsText(s.Claims))
		}
		q.Suggestions = append(q.Suggestions, s)
	}
	q.otherNodes(ctx)
}

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// trial is about changes of one request.
type trial struct {
	*inquiry
	ask
	nodes []*corev1.Node
	// empty is the fleet without claims where the request could not even be allocated there, or nil.
	empty *allocation.Planner
}

// confirm adds a suggestion if the allocator allocates everything after the change, or would as soon as others have ended: what nothing can
// serve is to be corrected first.
func (t *trial) confirm(ctx context.Context, kind SuggestionKind, text string, change func(ask)) bool {
	claims := t.with(t.claim, t.changed(change))
	node, fits := t.try(ctx, t.planner, t.nodes, claims)
	s := Suggestion{Kind: kind, Node: node, Text: text + t.of()}
	if !fits && t.empty != nil {
		if node, fits = t.try(ctx, t.empty, t.nodes, claims); fits {
			s.Node, s.Claims = "", t.holding(ctx, node, claims)
			s.Text += "; then it waits for " + claimsText(s.Claims)
		}
	}
	if fits {
		t.Suggestions = append(t.Suggestions, s)
	}
	return fits
}

// of names the request where there are others.
func (t *trial) of() string {
	if len(t.claims) == 1 && len(asksOf(t.claim)) == 1 {
		return ""
	}
	return fmt.Sprintf(" (claim %s, request %s)", t.claim.Name, t.name)
}

// with returns all claims, one of them replaced.
func (q *inquiry) with(claim, other *resourceapi.ResourceClaim) []*resourceapi.ResourceClaim {
	claims := slices.Clone(q.allClaims())
	claims[slices.Index(claims, claim)] = other
	return claims
}

// values tries what devices have in place of a text that a selector compares.
func (t *trial) values(ctx context.Context) {
	for i, s := range *t.ask.selectors {
		if s.CEL == nil {
			continue
		}
		for _, m := range equality.FindAllStringSubmatch(s.CEL.Expression, -1) {
			asked := m[2] + m[3]
			found := 0
			for _, value := range t.alternatives(ctx, m[1], asked) {
				if value == asked || found == mostValues {
					continue
				}
				expression := strings.ReplaceAll(s.CEL.Expression, m[0], m[0][:strings.LastIndex(m[0], "==")]+"== "+quotedCEL(value))
				if t.confirm(ctx, ChangeValue, fmt.Sprintf("with %s %s in place of %s", m[1], value, asked), setSelector(i, expression)) {
					found++
				}
			}
		}
	}
}

// quotedCEL returns a text as CEL has it. What devices publish is not to be part of an expression.
func quotedCEL(text string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`, "\n", `\n`, "\r", `\r`).Replace(text) + "'"
}

// alternatives returns what devices have in place of a text. If some have the text it is not
// misspelt, and what comes next is what has the most memory; otherwise what is written alike.
func (t *trial) alternatives(ctx context.Context, attribute, asked string) []string {
	memory := map[string]int64{}
	for _, d := range t.devicesOf(ctx, *t.class) {
		if value := textOf(d, attribute); value != "" {
			size := amountOf(d, fleet.CapacityMemory)
			memory[value] = max(memory[value], size.Value())
		}
	}
	values := sets.List(sets.KeySet(memory))
	if _, exists := memory[asked]; !exists {
		return byDistance(asked, values)
	}
	slices.SortStableFunc(values, func(a, b string) int { return cmp.Compare(memory[b], memory[a]) })
	return values
}

// textOf returns an attribute by its name without domain, and amountOf a capacity.
func textOf(d *resourceapi.Device, attribute string) string {
	for name, a := range d.Attributes {
		if unqualified(string(name)) == attribute && a.StringValue != nil {
			return *a.StringValue
		}
	}
	return ""
}

func amountOf(d *resourceapi.Device, capacity string) resource.Quantity {
	for name, c := range d.Capacity {
		if unqualified(string(name)) == capacity {
			return c.Value
		}
	}
	return resource.Quantity{}
}

func unqualified(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

func setSelector(i int, expression string) func(ask) {
	return func(a ask) { (*a.selectors)[i].CEL = &resourceapi.CELDeviceSelector{Expression: expression} }
}

// quantity finds amounts in selectors.
var quantity = regexp.MustCompile(`\.([a-zA-Z_][a-zA-Z0-9_]*)\.(?:compareTo|isGreaterThan)\(quantity\((?:'([^']*)'|"([^"]*)")\)\)`)

// memory tries smaller amounts in place of one that a selector compares.
func (t *trial) memory(ctx context.Context) {
	for i, s := range *t.ask.selectors {
		if s.CEL == nil {
			continue
		}
		for _, m := range quantity.FindAllStringSubmatch(s.CEL.Expression, -1) {
			asked, err := resource.ParseQuantity(m[2] + m[3])
			if err != nil {
				continue
			}
			for _, amount := range smaller(t.amountsOf(ctx, *t.class, m[1]), asked) {
				expression := strings.ReplaceAll(s.CEL.Expression, m[0], strings.Replace(m[0], m[2]+m[3], amount.String(), 1))
				if t.confirm(ctx, ChangeValue, fmt.Sprintf("with %s %s in place of %s", m[1], amount.String(), asked.String()), setSelector(i, expression)) {
					break
				}
			}
		}
	}
}

// amountsOf returns what the devices of a class have of a capacity, rounded down.
func (q *inquiry) amountsOf(ctx context.Context, class, name string) []resource.Quantity {
	var out []resource.Quantity
	for _, d := range q.devicesOf(ctx, class) {
		if amount := amountOf(d, name); !amount.IsZero() {
			out = append(out, roundDown(amount))
		}
	}
	return out
}

// roundDown makes a long amount readable.
func roundDown(q resource.Quantity) resource.Quantity {
	const gi = 1 << 30
	if q.Value() < gi {
		return q
	}
	return *resource.NewQuantity(q.Value()/gi*gi, resource.BinarySI)
}

// smaller returns different amounts below one, the largest first, no more than are tried.
func smaller(amounts []resource.Quantity, than resource.Quantity) []resource.Quantity {
	below := slices.DeleteFunc(slices.Clone(amounts), func(q resource.Quantity) bool { return q.Cmp(than) >= 0 || q.Sign() <= 0 })
	slices.SortFunc(below, func(a, b resource.Quantity) int { return b.Cmp(a) })
	below = slices.CompactFunc(below, func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 })
	return below[:min(len(below), mostTries)]
}

// capacities tries less of a shared device.
func (t *trial) capacities(ctx context.Context) {
	if *t.capacity == nil {
		return
	}
	j := newJudge(cmp.Or(t.empty, t.planner))
	for _, name := range sortedNames((*t.capacity).Requests) {
		asked := (*t.capacity).Requests[name]
		drop := func(a ask) { delete((*a.capacity).Requests, name) }
		without := t.changed(drop)
		var amounts []resource.Quantity
		for _, a := range asksOf(without) {
			if a.position != t.position {
				continue
			}
			for _, n := range t.nodes {
				amounts = append(amounts, offered(ctx, j, n, a, name)...)
			}
		}
		if near := nearest(string(name), t.capacityNames(ctx)); len(amounts) == 0 && near != "" {
			t.confirm(ctx, RenameCapacity, fmt.Sprintf("with capacity %s in place of %s", near, name), func(a ask) {
				drop(a)
				(*a.capacity).Requests[resourceapi.QualifiedName(near)] = asked
			})
		}
		if len(amounts) == 0 {
			t.confirm(ctx, DropCapacity, fmt.Sprintf("without %s %s", name, asked.String()), drop)
		}
		for _, amount := range smaller(amounts, asked) {
			if t.confirm(ctx, LowerCapacity, fmt.Sprintf("with %s %s in place of %s", name, amount.String(), asked.String()), func(a ask) { (*a.capacity).Requests[name] = amount }) {
				break
			}
		}
	}
}

// offered returns the most that a claim can get of each device that would do otherwise.
func offered(ctx context.Context, j *judge, node *corev1.Node, a ask, name resourceapi.QualifiedName) []resource.Quantity {
	var out []resource.Quantity
	for _, f := range j.onNode(ctx, node, a) {
		c, has := f.device.Capacity[name]
		if !has || f.cause() != "" && f.cause() != CapacityUsed {
			continue
		}
		left := j.left(&f, name)
		if c.RequestPolicy != nil && c.RequestPolicy.ValidRange != nil {
			left = stepDown(left, c.RequestPolicy.ValidRange)
		}
		out = append(out, roundDown(left))
	}
	return out
}

// capacityNames returns those of the devices of the class.
func (t *trial) capacityNames(ctx context.Context) []string {
	names := sets.New[string]()
	for _, d := range t.devicesOf(ctx, *t.class) {
		for name := range d.Capacity {
			names.Insert(string(name))
		}
	}
	return sets.List(names)
}

// stepDown returns the largest amount that a range allows and that is not more than q.
func stepDown(q resource.Quantity, r *resourceapi.CapacityRequestPolicyRange) resource.Quantity {
	if r.Max != nil && q.Cmp(*r.Max) > 0 {
		q = r.Max.DeepCopy()
	}
	lowest := ptr.Deref(r.Min, resource.Quantity{})
	if q.Cmp(lowest) < 0 {
		return resource.Quantity{}
	}
	if r.Step != nil && r.Step.Value() > 0 {
		return *resource.NewQuantity(q.Value()-(q.Value()-lowest.Value())%r.Step.Value(), r.Step.Format)
	}
	return q
}

// count tries fewer devices: the largest number that fits.
func (t *trial) count(ctx context.Context) {
	if t.mode != resourceapi.DeviceAllocationModeExactCount || *t.ask.count < 2 {
		return
	}
	set := func(n int64) func(ask) { return func(a ask) { *a.count = n } }
	low, high := int64(0), min(*t.ask.count, resourceapi.AllocationResultsMaxSize+1)
	for high-low > 1 {
		middle := (low + high) / 2
		if _, fits := t.try(ctx, t.planner, t.nodes, t.with(t.claim, t.changed(set(middle)))); fits {
			low = middle
		} else {
			high = middle
		}
	}
	if low > 0 {
		t.confirm(ctx, LowerCount, fmt.Sprintf("with count %d in place of %d", low, *t.ask.count), set(low))
	}
}

// selectors tries to do without one of several, or without the only one.
func (t *trial) selectors(ctx context.Context) {
	for i, s := range *t.ask.selectors {
		if s.CEL == nil {
			continue
		}
		t.confirm(ctx, DropSelector, fmt.Sprintf("without selector %d: %s", i, oneLine(s.CEL.Expression)), func(a ask) { *a.selectors = slices.Delete(*a.selectors, i, i+1) })
	}
}

// constraints tries to do without one.
func (q *inquiry) constraints(ctx context.Context, c *resourceapi.ResourceClaim, nodes []*corev1.Node) {
	for i := range c.Spec.Devices.Constraints {
		other := c.DeepCopy()
		other.Spec.Devices.Constraints = slices.Delete(other.Spec.Devices.Constraints, i, i+1)
		if node, fits := q.try(ctx, q.planner, nodes, q.with(c, other)); fits {
			q.Suggestions = append(q.Suggestions, Suggestion{
				Kind: DropConstraint, Node: node, Text: fmt.Sprintf("without the constraint on %s of claim %s", constraintName(&c.Spec.Devices.Constraints[i]), c.Name),
			})
		}
	}
}

// otherNodes says how the pod could use nodes that it is kept from.
func (q *inquiry) otherNodes(ctx context.Context) {
	advised := sets.New[allocation.ObstacleKind]()
	slices.SortStableFunc(q.excluded, func(a, b exclusion) int { return cmp.Compare(len(a.obstacles), len(b.obstacles)) })
	for _, e := range q.excluded {
		kind := e.obstacles[0].Kind
		if len(e.obstacles) != 1 || advised.Has(kind) || advice[kind] == "" {
			continue
		}
		if _, fits := q.try(ctx, q.planner, []*corev1.Node{e.node}, q.allClaims()); fits {
			advised.Insert(kind)
			q.Suggestions = append(q.Suggestions, Suggestion{Kind: ChangeNode, Node: e.node.Name, Text: fmt.Sprintf(advice[kind], e.node.Name)})
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
