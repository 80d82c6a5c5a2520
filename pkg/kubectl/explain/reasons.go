// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// gaveUp says why the scheduler gives up for all nodes.
func gaveUp(s *sight, a *allocation.Answer) {
	r := Reason{Cause: SearchTooLong, Nodes: []string{a.Node}}
	if a.Verdict == allocation.TimedOut {
		s.because(r, "the search for devices on node %s takes longer than %s: the scheduler stops, too, and tries again without getting any further. Ask for fewer devices in one claim, or for devices by stricter selectors",
			a.Node, s.x.planner.TimeLimit)
		return
	}
	text := a.Err.Error()
	r.Cause = Unexplained
	for _, known := range []struct {
		part  string
		cause Cause
	}{
		{"exceeds the claim limit", TooManyResults}, {"CEL", ExpressionError}, {"is currently being updated", PoolIncomplete},
		{"is currently invalid", PoolInvalid}, {"a claim constraint would not be satisfied", NotTogether},
	} {
		if strings.Contains(text, known.part) {
			r.Cause = known.cause
			break
		}
	}
	switch r.Cause {
	case TooManyResults:
		text = fmt.Sprintf("a claim can have at most %d devices: %s", resourceapi.AllocationResultsMaxSize, text)
	case ExpressionError:
		text += ". The scheduler gives up for all nodes"
		if missing := missingName.FindStringSubmatch(text); missing != nil {
			text += whoHas(s, missing[1], missing[2])
		}
	}
	s.because(r, "%s", text)
}

// tally counts why devices do not do for a request.
type tally struct {
	total, fit int
	causes     map[Cause]*counted
	// mostCapable and mostFit are of the node that has most.
	mostCapable, mostFit int
	bestNode             string
}

// counted are the devices that do not do for one cause.
type counted struct {
	devices int
	nodes   sets.Set[string]
	details map[string]int
	// first is one of them, of those with too little capacity the largest.
	first finding
}

func count(ctx context.Context, s *sight, j *judge, a ask) *tally {
	t := &tally{causes: map[Cause]*counted{}}
	for _, kind := range s.kinds() {
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
	t.total += len(kind)
	if f.cause() == "" {
		t.fit += len(kind)
		return
	}
	c := t.causes[f.cause()]
	if c == nil {
		c = &counted{nodes: sets.New[string](), details: map[string]int{}, first: *f}
		t.causes[f.cause()] = c
	}
	if f.most.Cmp(c.first.most) > 0 {
		c.first = *f
	}
	c.devices += len(kind)
	c.details[f.detail] += len(kind)
	for _, node := range kind {
		c.nodes.Insert(node.Name)
	}
}

// of returns the devices that a cause rules out, if any.
func (t *tally) of(c Cause) *counted { return cmp.Or(t.causes[c], &counted{}) }

// often returns what was counted, the most frequent first.
func often(counts map[string]int) []string {
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b)) })
}

// text lists the details, with how many devices have each where they differ.
func (c *counted) text() string {
	all := often(c.details)
	for i, detail := range all {
		if len(all) > 1 {
			all[i] = fmt.Sprintf("%s (%d)", detail, c.details[detail])
		}
	}
	return strings.Join(all, ", ")
}

// refusals are the reasons why no node does. The Planner is that of a cluster without claims if not even that would do on the nodes that
// the pod may run on.
func refusals(ctx context.Context, s *sight, j *judge, empty *allocation.Planner) {
	excludedNodes(ctx, s, empty)
	if len(s.nodes) == 0 {
		return
	}
	before := len(s.Reasons)
	for _, c := range s.wanted(nil) {
		s.Reasons = append(s.Reasons, ofClaim(ctx, s, j, c)...)
	}
	if len(s.Reasons) > before {
		return
	}
	text := "devices are free for each request by itself, but not for all of them at once on one node"
	if len(s.Unseen) > 0 {
		text = "as far as can be seen, " + text
	}
	if all := compared(s.claims); len(all) > 0 {
		text += ", or not such that constraints are met: " + strings.Join(all, ", ")
	}
	s.because(Reason{Cause: NotTogether}, "%s", text)
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

// unusablePools names the nodes whose pools the scheduler does not use.
func unusablePools(t *tally, add func(Cause, string, ...any) *Reason) {
	for _, c := range []Cause{PoolIncomplete, PoolInvalid} {
		if of := t.of(c); of.devices > 0 {
			add(c, "nothing is allocated from %s: %s", nodesText(sets.List(of.nodes)), often(of.details)[0])
		}
	}
}

// tooFew says that no node has as many devices as are wanted.
func tooFew(a ask, t *tally, capable int) string {
	text := fmt.Sprintf("%d devices are wanted, and no node has more than %d that %s", *a.Count, t.mostCapable, plural(t.mostCapable, "matches", "match"))
	if t.of(Withdrawn).devices > 0 {
		text += "; " + t.withdrawn(capable)
	}
	return text
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
	add := func(c Cause, format string, args ...any) *Reason {
		out = append(out, Reason{
			Cause: c, Claim: a.claim.Name, Request: a.Name, Devices: t.of(c).devices, Nodes: sets.List(t.of(c).nodes), Text: fmt.Sprintf(format, args...),
		})
		return &out[len(out)-1]
	}
	unusablePools(t, add)
	usable := t.total - t.of(PoolIncomplete).devices - t.of(PoolInvalid).devices
	ofClass := usable - t.of(NotOfClass).devices
	selected := ofClass - t.of(NotSelected).devices
	unknown, tooLarge := t.of(CapacityUnknown), t.of(CapacityTooLarge)
	capable := selected - unknown.devices - tooLarge.devices
	switch {
	case t.total == 0:
		text, help := s.x.absent()
		add(NoSlices, "%s", cmp.Or(text, "the nodes that it may run on publish no devices: does Partage run there?")).help = help
	case usable == 0:
	case ofClass == 0:
		text, help := notOffered(ctx, s, *a.Class)
		add(NotOfClass, "none of %d devices is of class %s%s", usable, *a.Class, text).help = help
	case selected == 0:
		add(NotSelected, "none of %d devices of class %s is selected: %s", ofClass, *a.Class, whySelected(ctx, s, a, t.of(NotSelected), ofClass))
	case capable == 0 && tooLarge.devices > 0:
		add(CapacityTooLarge, "%s", tooLarge.first.detail)
	case capable == 0:
		name := often(unknown.details)[0]
		add(CapacityUnknown, "the %d devices that are selected have no capacity %s%s", selected, name, whoHas(s, unknown.first.Driver, fleet.Unqualified(name)))
	case t.of(Withdrawn).devices == capable:
		add(Withdrawn, "%s", t.withdrawn(capable)).help = []Suggestion{suggest(ChangeClass, "%s", otherKinds(ctx, s))}
	case *a.Mode == resourceapi.DeviceAllocationModeExactCount && int(*a.Count) > t.mostCapable:
		add(TooFewDevices, "%s", tooFew(a, t, capable))
	case *a.Mode == resourceapi.DeviceAllocationModeAll && t.fit < capable, int64(t.mostFit) < max(1, *a.Count):
		taken(a, t, capable, s.atMost(), add)
		if t.of(Withdrawn).devices > 0 {
			// The others decide: they can be waited for.
			add(Withdrawn, "%s", t.withdrawn(capable)).order = 2 + order(&Reason{Cause: CountersUsed})
		}
	}
	return out
}

// taken says what keeps the devices that would do from being allocated.
func taken(a ask, t *tally, capable int, atMost string, add func(Cause, string, ...any) *Reason) {
	free := ""
	if t.mostFit > 0 && *a.Mode == resourceapi.DeviceAllocationModeExactCount {
		free = fmt.Sprintf("; %s%d free on node %s, %d wanted", atMost, t.mostFit, t.bestNode, *a.Count)
	}
	for _, c := range []struct {
		cause           Cause
		one, many, rest string
	}{
		{Tainted, "is", "are", "tainted: " + t.of(Tainted).text()},
		{Unconstrained, "has", "have", "no attribute " + t.of(Unconstrained).text() + ", which a constraint compares"},
		{Held, "is", "are", "held by claims"},
		{CapacityUsed, "has", "have", tooLittle(often(t.of(CapacityUsed).details))},
		{CountersUsed, "shares", "share", "a part of the GPU with devices that claims hold"},
	} {
		if n := t.of(c.cause).devices; n > 0 {
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

// excludedNodes says which nodes something other than devices keeps the pod from, and where it
// would find its devices otherwise, if that can be known. Where the other nodes could never serve it, those count that could, however full they are.
func excludedNodes(ctx context.Context, s *sight, empty *allocation.Planner) {
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
	if len(s.Unseen) == 0 {
		ask(s.x.planner, "would fit, but excluded")
		if empty != nil && len(s.nodes) > 0 {
			ask(s.x.hasty(empty), "would fit if less were taken, but excluded")
		}
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
	for _, text := range texts {
		s.because(Reason{Cause: NodeExcluded, Nodes: groups[text], wouldFit: strings.HasPrefix(text, "would fit")}, "%s %s", nodesText(groups[text]), text)
	}
}

// whySelected names the selectors that are false, and what the devices have instead.
func whySelected(ctx context.Context, s *sight, a ask, of *counted, ofClass int) string {
	var parts []string
	for _, index := range often(of.details) {
		n, _ := strconv.Atoi(index) // judge writes numbers only
		selector, at := (*a.Selectors)[n], fmt.Sprintf("for %d of them", of.details[index])
		if of.details[index] == ofClass {
			at = "for all"
		}
		part := fmt.Sprintf("selector %d is false %s: %s", n, at, oneLine(selector.CEL.Expression))
		for _, c := range comparisons(selector, equality) {
			values := sets.New[string]()
			for _, d := range s.devicesOf(ctx, *a.Class) {
				values.Insert(textOf(d.Device, c.name))
			}
			if values.Delete(""); len(values) > 0 && !values.Has(c.value) {
				part += fmt.Sprintf(". No device has %s %s; there are %s", c.name, c.value, strings.Join(sets.List(values), ", "))
			}
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, "; ")
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
