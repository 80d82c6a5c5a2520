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
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// gaveUp says why the scheduler gives up for all nodes.
func gaveUp(s *sight, a *allocation.Answer) Reason {
	if a.Verdict == allocation.TimedOut {
		return Reason{
			Cause: SearchTooLong, Nodes: []string{a.Node},
			Text: fmt.Sprintf("the search for devices on node %s takes longer than %s: the scheduler stops, too, and tries again without getting any further. Ask for fewer devices in one claim, or for devices by stricter selectors", a.Node, s.x.planner.TimeLimit),
		}
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
			if who := whoHas(s, missing[1], missing[2]); who != "" {
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
	return Reason{Cause: cause, Text: text, Nodes: []string{a.Node}}
}

// tally counts why devices do not do for a request.
type tally struct {
	total, fit int
	causes     map[Cause]int
	nodes      map[Cause]sets.Set[string]
	details    map[Cause]map[string]int
	// mostCapable and mostFit are of the node that has most.
	mostCapable, mostFit int
	bestNode             string
	first                map[Cause]finding
}

func count(ctx context.Context, s *sight, j *judge, a ask) *tally {
	t := &tally{causes: map[Cause]int{}, nodes: map[Cause]sets.Set[string]{}, details: map[Cause]map[string]int{}, first: map[Cause]finding{}}
	for _, kind := range s.eligible() {
		capable, fit := 0, 0
		for _, f := range j.onNode(ctx, kind[0], a) {
			t.add(&f, kind)
			switch f.cause() {
			case "":
				fit++
				capable++
			case Held, CountersUsed, CapacityUsed, Tainted, Withdrawn, Unconstrained:
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

// refusals are the reasons why no node does. The Planner is that of a cluster without claims if not even that would do on the nodes that
// the pod may run on.
func refusals(ctx context.Context, s *sight, j *judge, empty *allocation.Planner) []Reason {
	out := excludedNodes(ctx, s, empty)
	if len(s.nodes) == 0 {
		return out
	}
	before := len(out)
	for _, c := range s.wanted(nil) {
		out = append(out, ofClaim(ctx, s, j, c)...)
	}
	if len(out) == before {
		out = append(out, together(ctx, s, j))
	}
	return out
}

// isTaken reports whether a reason is that claims have devices.
func isTaken(r Reason) bool {
	return slices.Contains([]Cause{Held, CapacityUsed, CountersUsed, NotTogether}, r.Cause)
}

// ofClaim gives the reasons of a claim's requests. Of a request with alternatives none is a reason as
// long as one of them would do.
func ofClaim(ctx context.Context, s *sight, j *judge, c *resourceapi.ResourceClaim) []Reason {
	does, reasons := sets.New[int](), make([][][]Reason, len(c.Spec.Devices.Requests))
	for _, a := range asksOf(c) {
		i, of := a.Position[0], ofRequest(ctx, s, j, a)
		if !slices.ContainsFunc(of, Reason.refuses) {
			does.Insert(i)
		}
		reasons[i] = append(reasons[i], of)
	}
	var out []Reason
	for i, alternatives := range reasons {
		if does.Has(i) {
			// What is not whole is told of the request, once: that of an alternative would say that it does not do.
			of := slices.DeleteFunc(alternatives[0], Reason.refuses)
			for n := range of {
				of[n].Request = c.Spec.Devices.Requests[i].Name
			}
			alternatives = [][]Reason{of}
		}
		out = append(out, nearestFirst(alternatives)...)
	}
	return out
}

// refuses reports whether a reason of a request is about all devices that could do, not about a
// pool that is not whole.
func (r Reason) refuses() bool { return r.Cause != PoolIncomplete && r.Cause != PoolInvalid }

// nearestFirst joins the reasons of alternatives. Any of these would do: that decides which comes nearest to being allocated.
func nearestFirst(alternatives [][]Reason) []Reason {
	for _, reasons := range alternatives {
		sortReasons(reasons)
	}
	alternatives = slices.DeleteFunc(alternatives, func(of []Reason) bool { return len(of) == 0 })
	slices.SortStableFunc(alternatives, func(a, b []Reason) int { return cmp.Compare(group(b[0].Cause), group(a[0].Cause)) })
	out := slices.Concat(alternatives...)
	for i := range out {
		out[i].order = out[0].order
	}
	return out
}

// sortReasons puts the most informative first. Those of alternatives stay together.
func sortReasons(all []Reason) {
	for i := range all {
		if all[i].order == 0 {
			all[i].order = 1 + order(&all[i])
		}
	}
	slices.SortStableFunc(all, func(a, b Reason) int { return cmp.Compare(a.order, b.order) })
}

// ofRequest gives the reasons of one request.
func ofRequest(ctx context.Context, s *sight, j *judge, a ask) []Reason {
	var out []Reason
	t := count(ctx, s, j, a)
	add := func(c Cause, format string, args ...any) {
		out = append(out, Reason{
			Cause: c, Claim: a.claim.Name, Request: a.Name, Devices: t.causes[c], Nodes: sets.List(t.nodes[c]), Text: fmt.Sprintf(format, args...),
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
		add(NotOfClass, "none of %d devices is of class %s%s", usable, *a.Class, notOffered(s, *a.Class))
	case selected == 0:
		add(NotSelected, "none of %d devices of class %s is selected: %s", ofClass, *a.Class, whySelected(ctx, s, a, t, ofClass))
	case capable == 0 && t.causes[CapacityTooLarge] > 0:
		// That of the device that has most.
		add(CapacityTooLarge, "%s", t.first[CapacityTooLarge].detail)
	case capable == 0:
		name := t.often(CapacityUnknown)[0]
		text := fmt.Sprintf("the %d devices that are selected have no capacity %s", selected, name)
		if who := whoHas(s, t.first[CapacityUnknown].pool.Driver, unqualified(name)); who != "" {
			text += ". " + who
		}
		add(CapacityUnknown, "%s", text)
	case *a.Mode == resourceapi.DeviceAllocationModeExactCount && int(*a.Count) > t.mostCapable:
		add(TooFewDevices, "%s are wanted, and no node has more than %d that %s",
			a.wants(), t.mostCapable, plural(t.mostCapable, "matches", "match"))
	case t.mostFit < wanted(a), *a.Mode == resourceapi.DeviceAllocationModeAll && t.fit < capable:
		taken(a, t, capable, add)
	}
	return out
}

// notOffered says of a class for a kind of devices that the nodes which the pod may run on publish none of that kind.
func notOffered(s *sight, name string) string {
	published := sets.New[string]()
	for _, nodes := range s.eligible() {
		for d := range s.x.planner.Cluster.Devices(nodes[0]) {
			published.Insert(textOf(d.Device(), "type"))
		}
	}
	for _, selector := range s.x.planner.Cluster.Class(name).Spec.Selectors {
		if selector.CEL == nil {
			continue
		}
		for _, m := range equality.FindAllStringSubmatch(selector.CEL.Expression, -1) {
			if kind := kindsOffered[m[2]+m[3]]; m[1] == "type" && kind != "" && !published.Has(m[2]+m[3]) {
				return ": the administrator's sharing policy does not offer " + kind + " there, or the GPUs cannot have them"
			}
		}
	}
	return ""
}

// wanted returns how many devices a request needs on one node.
func wanted(a ask) int {
	if *a.Mode == resourceapi.DeviceAllocationModeAll {
		return 1
	}
	return int(*a.Count)
}

// taken says what keeps the devices that would do from being allocated.
func taken(a ask, t *tally, capable int, add func(Cause, string, ...any)) {
	free := ""
	if t.mostFit > 0 && *a.Mode == resourceapi.DeviceAllocationModeExactCount {
		free = fmt.Sprintf("; %d free on node %s, %d wanted", t.mostFit, t.bestNode, *a.Count)
	}
	for _, c := range []struct {
		cause     Cause
		one, many string
		rest      string
	}{
		{Tainted, "is", "are", "tainted: " + strings.Join(t.often(Tainted), ", ")},
		{Withdrawn, "is", "are", "withdrawn: " + strings.Join(t.often(Withdrawn), ", ")},
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
func together(ctx context.Context, s *sight, j *judge) Reason {
	text := "devices are free for each request by itself, but not for all of them at once on one node"
	if unmet := unmet(ctx, s, j); len(unmet) > 0 {
		text += ", or not such that constraints are met: " + strings.Join(unmet, ". ")
	}
	return Reason{Cause: NotTogether, Text: text}
}

// excludedNodes says which nodes something other than devices keeps the pod from, and where it
// would find its devices otherwise. Where the other nodes could never serve it, those count that could, however full they are.
func excludedNodes(ctx context.Context, s *sight, empty *allocation.Planner) []Reason {
	var nodes []*corev1.Node
	for _, e := range s.excluded {
		nodes = append(nodes, e.node)
	}
	verdicts := map[string]string{}
	ask := func(p *allocation.Planner, text string) {
		for _, a := range s.search(ctx, p, nodes) {
			if a.Verdict == allocation.Fits && verdicts[a.Node] == "" {
				verdicts[a.Node] = text
			}
		}
	}
	ask(s.x.planner, "would fit, but excluded")
	if empty != nil && len(s.nodes) > 0 {
		ask(s.x.hasty(empty), "would fit if less were taken, but excluded")
	}
	groups, texts := map[string][]string{}, []string(nil)
	for _, e := range s.excluded {
		verdict := verdicts[e.node.Name]
		if verdict == "" || slices.ContainsFunc(e.obstacles, func(o allocation.Obstacle) bool { return o.Kind == byClaim }) {
			verdict = "excluded"
		}
		text := verdict + ": " + allocation.Summary(e.obstacles)
		if groups[text] == nil {
			texts = append(texts, text)
		}
		groups[text] = append(groups[text], e.node.Name)
	}
	var out []Reason
	for _, text := range texts {
		out = append(out, Reason{Cause: NodeExcluded, Nodes: groups[text], Text: nodesText(groups[text]) + " " + text, wouldFit: strings.HasPrefix(text, "would fit")})
	}
	return out
}

// whySelected names the selectors that are false, and what the devices have instead.
func whySelected(ctx context.Context, s *sight, a ask, t *tally, ofClass int) string {
	var parts []string
	for _, index := range t.often(NotSelected) {
		var n int
		if _, err := fmt.Sscan(index, &n); err != nil || n >= len(*a.Selectors) {
			continue
		}
		expression := (*a.Selectors)[n].CEL.Expression
		part := fmt.Sprintf("selector %d is false for %d of them: %s", n, t.details[NotSelected][index], oneLine(expression))
		if t.details[NotSelected][index] == ofClass {
			part = fmt.Sprintf("selector %d is false for all: %s", n, oneLine(expression))
		}
		for _, m := range equality.FindAllStringSubmatch(expression, -1) {
			values := valuesOf(ctx, s, *a.Class, m[1])
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
func valuesOf(ctx context.Context, s *sight, class, attribute string) []string {
	values := sets.New[string]()
	for _, d := range s.devicesOf(ctx, class) {
		values.Insert(textOf(d, attribute))
	}
	return sets.List(values.Delete(""))
}
