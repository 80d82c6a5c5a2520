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

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// broken says why the scheduler gives up for all nodes.
func (q *inquiry) broken(a *allocation.Answer) {
	if a.Verdict == allocation.TimedOut {
		q.Reasons = append(q.Reasons, Reason{
			Cause: SearchTooLong, Nodes: []string{a.Node},
			Text: fmt.Sprintf("the search for devices on node %s takes longer than %s: the scheduler stops, too, and tries again without getting any further. Ask for fewer devices in one claim, or for devices by stricter selectors", a.Node, q.planner.TimeLimit()),
		})
		return
	}
	cause, text := Unexplained, a.Err.Error()
	switch {
	case strings.Contains(text, "exceeds the claim limit"):
		cause = TooManyResults
		text = fmt.Sprintf("a claim can have at most %d devices: %s", resourceapi.AllocationResultsMaxSize, text)
	case strings.Contains(text, "CEL"):
		cause = ExpressionError
		text += ". The scheduler gives up for all nodes"
		if missing := missingName.FindStringSubmatch(text); missing != nil {
			if who := q.whoHas(missing[1], missing[2]); who != "" {
				text += ". " + who
			}
		}
	case strings.Contains(text, "is currently being updated"):
		cause = PoolIncomplete
	case strings.Contains(text, "is currently invalid"):
		cause = PoolInvalid
	case strings.Contains(text, "a claim constraint would not be satisfied"):
		cause = NotTogether
	}
	q.Reasons = append(q.Reasons, Reason{Cause: cause, Text: text, Nodes: []string{a.Node}})
}

// tally counts why devices do not do for a request.
type tally struct {
	total, fit int
	causes     map[Cause]int
	nodes      map[Cause]sets.Set[string]
	details    map[Cause]map[string]int
	// mostOfKind and mostFit are of the node that has most.
	mostCapable, mostFit int
	bestNode             string
	first                map[Cause]finding
}

func (q *inquiry) tally(ctx context.Context, j *judge, a ask) *tally {
	t := &tally{causes: map[Cause]int{}, nodes: map[Cause]sets.Set[string]{}, details: map[Cause]map[string]int{}, first: map[Cause]finding{}}
	for _, kind := range q.eligible() {
		capable, fit := 0, 0
		for _, f := range j.onNode(ctx, kind[0], a) {
			t.add(&f, kind)
			switch f.cause() {
			case "":
				fit++
				capable++
			case Held, CountersUsed, CapacityUsed, Tainted, Unconstrained:
				capable++
			}
		}
		t.mostCapable = max(t.mostCapable, capable)
		if fit > t.mostFit || t.bestNode == "" {
			t.mostFit, t.bestNode = fit, kind[0].Name
		}
	}
	return t
}

func (t *tally) add(f *finding, kind []*corev1.Node) {
	n, c := len(kind), f.cause()
	t.total += n
	if c == "" {
		t.fit += n
		return
	}
	if t.details[c] == nil {
		t.details[c], t.nodes[c], t.first[c] = map[string]int{}, sets.New[string](), *f
	}
	if first := t.first[c]; f.most.Cmp(first.most) > 0 {
		t.first[c] = *f
	}
	t.causes[c] += n
	t.details[c][f.detail] += n
	for _, node := range kind {
		t.nodes[c].Insert(node.Name)
	}
}

// often returns the details of a cause, the most frequent first.
func (t *tally) often(c Cause) []string {
	details := sets.List(sets.KeySet(t.details[c]))
	slices.SortStableFunc(details, func(a, b string) int { return cmp.Compare(t.details[c][b], t.details[c][a]) })
	return details
}

// eligible returns the nodes that the pod may run on, those of a kind together.
func (q *inquiry) eligible() [][]*corev1.Node {
	allowed := sets.New(q.nodes...)
	var out [][]*corev1.Node
	for _, kind := range q.kinds() {
		if some := slices.DeleteFunc(slices.Clone(kind), func(n *corev1.Node) bool { return !allowed.Has(n) }); len(some) > 0 {
			out = append(out, some)
		}
	}
	return out
}

// refused gives the reasons why no node does.
func (q *inquiry) refused(ctx context.Context) {
	j := newJudge(q.planner)
	q.excludedNodes(ctx)
	if len(q.nodes) > 0 {
		before := len(q.Reasons)
		for _, c := range q.allClaims() {
			q.ofClaim(ctx, j, c)
		}
		if len(q.Reasons) == before {
			q.together(ctx, j)
		}
		if slices.ContainsFunc(q.Reasons, isTaken) {
			q.inTheWay(ctx, j)
		}
	}
	slices.SortStableFunc(q.Reasons, func(a, b Reason) int { return cmp.Compare(a.rank(), b.rank()) })
}

// isTaken reports whether a reason is that claims have devices.
func isTaken(r Reason) bool {
	return slices.Contains([]Cause{Held, CapacityUsed, CountersUsed, NotTogether}, r.Cause)
}

// allClaims returns the claims to be allocated, with that of extended resources.
func (q *inquiry) allClaims() []*resourceapi.ResourceClaim {
	if q.pod == nil {
		return q.claims
	}
	if extended := q.planner.ExtendedClaim(q.pod, nil); extended != nil {
		return append(slices.Clip(q.claims), extended)
	}
	return q.claims
}

// ranks is the order in which causes are told.
var ranks = []Cause{
	Gated, Refused, ResourceUnserved, VolumeMissing, ClaimNotCreated, OwnPredecessor,
	ClaimMissing, TemplateMissing, ClaimNotOwned, ClaimDeleted, ClaimInvalid, NotBound, ClassMissing, ClaimFull, AdminForbidden, TooManyResults, ExpressionError, NoSlices, SearchTooLong,
	NotOfClass, NotSelected, CapacityUnknown, CapacityTooLarge, TooFewDevices, NodeExcluded, Tainted, Unconstrained, Held, CapacityUsed, CountersUsed,
	PoolIncomplete, PoolInvalid, NotTogether, Unexplained,
}

func rank(c Cause) int { return slices.Index(ranks, c) }

// rank is that of its cause. Where there is a node with the devices, what keeps the pod from it
// says more than what other nodes lack.
func (r Reason) rank() int {
	if r.wouldFit {
		return 2*rank(NotOfClass) - 1
	}
	return 2 * rank(r.Cause)
}

// ofRequest gives the reasons of one request.
func (q *inquiry) ofRequest(ctx context.Context, j *judge, a ask) {
	t := q.tally(ctx, j, a)
	add := func(c Cause, format string, args ...any) {
		q.Reasons = append(q.Reasons, Reason{
			Cause: c, Claim: a.claim.Name, Request: a.name, Devices: t.causes[c], Nodes: sets.List(t.nodes[c]), Text: fmt.Sprintf(format, args...),
		})
	}
	for _, c := range []Cause{PoolIncomplete, PoolInvalid} {
		if t.causes[c] > 0 {
			add(c, "nothing is allocated from %s: %s", nodesText(sets.List(t.nodes[c])), t.often(c)[0])
		}
	}
	usable := t.total - t.causes[PoolIncomplete] - t.causes[PoolInvalid]
	ofClass := usable - t.causes[NotOfClass]
	selected := ofClass - t.causes[NotSelected]
	capable := selected - t.causes[CapacityUnknown] - t.causes[CapacityTooLarge]
	switch {
	case t.total == 0:
		add(NoSlices, "the nodes that it may run on publish no devices: does the driver run there?")
	case usable == 0:
	case ofClass == 0:
		add(NotOfClass, "none of %d devices is of class %s", usable, *a.class)
	case selected == 0:
		add(NotSelected, "none of %d devices of class %s is selected: %s", ofClass, *a.class, q.whySelected(ctx, a, t, ofClass))
	case capable == 0 && t.causes[CapacityTooLarge] > 0:
		// That of the device that has most.
		add(CapacityTooLarge, "%s", t.first[CapacityTooLarge].detail)
	case capable == 0:
		name := t.often(CapacityUnknown)[0]
		text := fmt.Sprintf("the %d devices that are selected have no capacity %s", selected, name)
		if who := q.whoHas(t.first[CapacityUnknown].pool.Driver, unqualified(name)); who != "" {
			text += ". " + who
		}
		add(CapacityUnknown, "%s", text)
	case a.mode == resourceapi.DeviceAllocationModeExactCount && int(*a.count) > t.mostCapable:
		add(TooFewDevices, "%s are wanted, and no node has more than %d that %s", a.wants(), t.mostCapable, match(t.mostCapable))
	case t.mostFit < wanted(a), a.mode == resourceapi.DeviceAllocationModeAll && t.fit < capable:
		q.taken(a, t, capable, add)
	}
}

func match(n int) string {
	if n == 1 {
		return "matches"
	}
	return "match"
}

// wanted returns how many devices a request needs on one node.
func wanted(a ask) int {
	if a.mode == resourceapi.DeviceAllocationModeAll {
		return 1
	}
	return int(*a.count)
}

// taken says what keeps the devices that would do from being allocated.
func (q *inquiry) taken(a ask, t *tally, capable int, add func(Cause, string, ...any)) {
	free := ""
	if t.mostFit > 0 && a.mode == resourceapi.DeviceAllocationModeExactCount {
		free = fmt.Sprintf("; %d free on node %s, %d wanted", t.mostFit, t.bestNode, *a.count)
	}
	for _, c := range []struct {
		cause     Cause
		one, many string
		rest      string
	}{
		{Tainted, "is", "are", strings.Join(t.often(Tainted), ", ")},
		{Unconstrained, "has", "have", "no attribute " + strings.Join(t.often(Unconstrained), ", ") + ", which a constraint compares"},
		{Held, "is", "are", "held by claims"},
		{CapacityUsed, "has", "have", tooLittle(t.often(CapacityUsed))},
		{CountersUsed, "shares", "share", "a part of the GPU with devices that claims hold"},
	} {
		if n := t.causes[c.cause]; n > 0 {
			add(c.cause, "%d of %d matching devices %s %s%s", n, capable, plural(n, c.one, c.many), c.rest, free)
		}
	}
}

// tooLittle says what is used up of shared devices.
func tooLittle(names []string) string {
	if slices.Equal(names, []string{fleet.CapacityShares}) {
		return "no share left"
	}
	return "too little " + strings.Join(names, ", ") + " left"
}

// together says that each device does by itself, but not all of them at once.
func (q *inquiry) together(ctx context.Context, j *judge) {
	text := "devices are free for each request by itself, but not for all of them at once on one node"
	if unmet := q.unmet(ctx, j); len(unmet) > 0 {
		text += ", or not such that constraints are met: " + strings.Join(unmet, ". ")
	}
	q.Reasons = append(q.Reasons, Reason{Cause: NotTogether, Text: text})
}

// excludedNodes says which nodes something other than devices keeps the pod from, and where it
// would find its devices otherwise.
func (q *inquiry) excludedNodes(ctx context.Context) {
	if len(q.excluded) == 0 {
		return
	}
	var nodes []*corev1.Node
	for _, e := range q.excluded {
		nodes = append(nodes, e.node)
	}
	fits := sets.New[string]()
	for _, a := range q.search(ctx, nodes) {
		if a.Verdict == allocation.Fits {
			fits.Insert(a.Node)
		}
	}
	for _, e := range q.excluded {
		if slices.ContainsFunc(e.obstacles, func(o allocation.Obstacle) bool { return o.Kind == byClaim }) {
			fits.Delete(e.node.Name)
		}
	}
	type group struct {
		text string
		fits bool
	}
	groups, order := map[group][]string{}, []group{}
	for _, e := range q.excluded {
		g := group{allocation.Summary(e.obstacles), fits.Has(e.node.Name)}
		if groups[g] == nil {
			order = append(order, g)
		}
		groups[g] = append(groups[g], e.node.Name)
	}
	slices.SortStableFunc(order, func(a, b group) int { return cmp.Compare(truth(b.fits), truth(a.fits)) })
	for _, g := range order {
		text := "%s excluded: %s"
		if g.fits {
			text = "%s would fit, but excluded: %s"
		}
		q.Reasons = append(q.Reasons, Reason{Cause: NodeExcluded, Nodes: groups[g], Text: fmt.Sprintf(text, nodesText(groups[g]), g.text), wouldFit: g.fits})
	}
}

func truth(b bool) int {
	if b {
		return 1
	}
	return 0
}

// equality finds comparisons of an attribute with a text, such as .profile == '1g.10gb'.
var equality = regexp.MustCompile(`\.([A-Za-z_][A-Za-z0-9_]*)\s*==\s*(?:'([^'\\]*)'|"([^"\\]*)")`)

// whySelected names the selectors that are false, and what the devices have instead.
func (q *inquiry) whySelected(ctx context.Context, a ask, t *tally, ofClass int) string {
	var parts []string
	for _, index := range t.often(NotSelected) {
		var n int
		if _, err := fmt.Sscan(index, &n); err != nil || n >= len(*a.selectors) {
			continue
		}
		expression := (*a.selectors)[n].CEL.Expression
		part := fmt.Sprintf("selector %d is false for %d of them: %s", n, t.details[NotSelected][index], oneLine(expression))
		if t.details[NotSelected][index] == ofClass {
			part = fmt.Sprintf("selector %d is false for all: %s", n, oneLine(expression))
		}
		for _, m := range equality.FindAllStringSubmatch(expression, -1) {
			values := q.valuesOf(ctx, *a.class, m[1])
			asked := m[2] + m[3]
			if len(values) > 0 && !slices.Contains(values, asked) {
				part += fmt.Sprintf(". No device has %s %s; there are %s", m[1], asked, strings.Join(values, ", "))
			}
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, "; ")
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// valuesOf returns the texts that an attribute has among the devices of a class.
func (q *inquiry) valuesOf(ctx context.Context, class, attribute string) []string {
	values := sets.New[string]()
	for _, d := range q.devicesOf(ctx, class) {
		values.Insert(textOf(d, attribute))
	}
	values.Delete("")
	return sets.List(values)
}

// devicesOf returns the devices of a class on the nodes that the pod may run on, of one node of
// each kind.
func (q *inquiry) devicesOf(ctx context.Context, name string) []*resourceapi.Device {
	class := q.planner.Class(name)
	if class == nil {
		return nil
	}
	var out []*resourceapi.Device
	matcher := q.planner.NewMatcher()
	for _, kind := range q.eligible() {
		for _, pool := range q.planner.PoolsOn(kind[0].Name) {
			for _, s := range pool.Slices {
				reaches := q.planner.Reaches(s, kind[0])
				for i := range s.Spec.Devices {
					is := reaches(&s.Spec.Devices[i]) && !slices.ContainsFunc(class.Spec.Selectors, func(selector resourceapi.DeviceSelector) bool {
						if selector.CEL == nil {
							return true
						}
						matches, err := matcher.Matches(ctx, selector.CEL.Expression, s, i)
						return err != nil || !matches
					})
					if is {
						out = append(out, &s.Spec.Devices[i])
					}
				}
			}
		}
	}
	return out
}
