// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"go/ast"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/docs/source"
)

// TestEventsPage: docs/reference/events.md has all events that the driver writes, with the type
// and the objects that they have. What they mean and what to do is written by hand.
func TestEventsPage(t *testing.T) {
	t.Parallel()
	want := eventsInCode(t)
	var names []string
	for _, row := range page.Rows(t, "docs/reference/events.md", "event", "type", "of", "what it says", "what to do") {
		name := strings.Trim(row[0], "`")
		names = append(names, name)
		is, exists := want[name]
		delete(want, name)
		switch {
		case !exists:
			t.Errorf("nothing writes the event %s", name)
		case row[1] != is.types() || row[2] != is.objects():
			t.Errorf("the event %s: the page says %s of %s, the code %s of %s", name, row[1], row[2], is.types(), is.objects())
		case row[3] == "" || row[4] == "":
			t.Errorf("the event %s is not explained", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		t.Errorf("the page lacks | `%s` | %s | %s | … | … |", name, want[name].types(), want[name].objects())
	}
	if !slices.IsSorted(names) {
		t.Error("the events are not in the order of their names")
	}
	if t.Logf("%d cases", len(names)); len(names) < 35 {
		t.Errorf("only %d events", len(names))
	}
}

// TestFailuresPage: docs/reference/metrics.md says what each reason of a failure means.
func TestFailuresPage(t *testing.T) {
	t.Parallel()
	var names []string
	for _, row := range page.Rows(t, "docs/reference/metrics.md", "reason", "why a claim could not be prepared or released") {
		names = append(names, strings.Trim(row[0], "`"))
	}
	if want := FailureReasons(); !slices.Equal(names, want) {
		t.Errorf("the page has the reasons %v, want %v", names, want)
	}
}

// eventFacts are what the code says of an event.
type eventFacts struct{ normal, warning, ofNode, ofClaim, ofPods bool }

func (e *eventFacts) types() string {
	return joined(map[string]bool{"Normal": e.normal, "Warning": e.warning}, "Normal", "Warning")
}

func (e *eventFacts) objects() string {
	return joined(map[string]bool{"node": e.ofNode, "claim": e.ofClaim, "pods": e.ofPods}, "node", "claim", "pods")
}

func joined(which map[string]bool, all ...string) string {
	return strings.Join(slices.DeleteFunc(all, func(one string) bool { return !which[one] }), ", ")
}

// eventsInCode are those of conditions, and those that the sources have a constant for.
func eventsInCode(t *testing.T) map[string]*eventFacts {
	t.Helper()
	var files []*ast.File
	for _, folder := range []string{"../claim", "../claim/converge", "../usage", ".", "publish"} {
		files = append(files, source.Files(t, folder)...)
	}
	found := &eventFinder{t: t, files: files, constants: map[string]string{}, events: map[string]*eventFacts{}}
	withoutEvent := []device.Reason{device.Withdrawn, device.AdminAccess, device.Gone}
	for _, c := range source.Constants(source.Files(t, "../../device"), "Reason") {
		reason := device.Reason(c.Value)
		if slices.Contains(withoutEvent, reason) {
			continue
		}
		text, has := conditionTexts[reason]
		if !has {
			t.Errorf("nobody is told about the condition %s", reason)
		}
		begins, over := found.event(eventReason(reason)), found.event(recoveryReason(reason))
		begins.warning, over.normal, begins.ofNode, over.ofNode = true, true, true, true
		if text.users != "" {
			begins.ofClaim, begins.ofPods, over.ofClaim, over.ofPods = true, true, true, true
		}
	}
	for _, c := range source.Constants(files, "") {
		found.constants[c.Name] = c.Value
	}
	for _, file := range files {
		ast.Inspect(file, found.look)
	}
	for _, name := range source.Names(files, "eventReasons") {
		facts := ofUsers
		if name == "ReasonDamagedRecord" { // of such a claim only the UID is known
			facts = eventFacts{ofNode: true}
		}
		found.add(ast.NewIdent(name), nil, facts)
	}
	for name, value := range found.constants {
		inStatusOnly := value == reasonReady || value == reasonMPSStopped
		if strings.HasPrefix(strings.ToLower(name), "reason") && found.events[value] == nil && !inStatusOnly {
			t.Errorf("%s is the reason of no event that this test finds", name)
		}
	}
	return found.events
}

// eventFinder looks for what writes events.
type eventFinder struct {
	t         *testing.T
	files     []*ast.File
	constants map[string]string
	events    map[string]*eventFacts
}

func (f *eventFinder) event(reason string) *eventFacts {
	if f.events[reason] == nil {
		f.events[reason] = &eventFacts{}
	}
	return f.events[reason]
}

// look looks at an expression that may make an event.
func (f *eventFinder) look(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.CallExpr:
		f.call(n)
	case *ast.CompositeLit:
		if nameOf(n.Type) == "news" { // of a session, the reason comes first
			f.add(n.Elts[0], nil, ofUsers)
		}
		fields := map[string]ast.Expr{}
		for _, e := range n.Elts {
			if pair, is := e.(*ast.KeyValueExpr); is {
				fields[nameOf(pair.Key)] = pair.Value
			}
		}
		of, isSelector := n.Type.(*ast.SelectorExpr)
		isRule := isSelector && nameOf(of.X) == "rules" // a statement of the rules, which is no event
		if name := nameOf(n.Type); isRule || fields["Reason"] == nil || name != "Event" && name != "Statement" {
			return true
		}
		facts := ofUsers
		// A claim of which only the UID is known is no object for an event.
		if _, noName := fields["Claim"].(*ast.CompositeLit); noName || fields["Claim"] == nil {
			facts = eventFacts{ofNode: true}
		}
		f.add(fields["Reason"], fields["Type"], facts)
	}
	return true
}

var ofUsers = eventFacts{ofClaim: true, ofPods: true}

// call looks at a call of one of the functions that make events, by their names and the
// numbers of their arguments.
func (f *eventFinder) call(c *ast.CallExpr) {
	switch name := nameOf(c.Fun); {
	case name == "Say" && len(c.Args) == 3:
		f.add(c.Args[1], nil, eventFacts{ofNode: true})
	case name == "Warn" && len(c.Args) == 4:
		f.add(c.Args[2], nil, ofUsers)
	case name == "warn" && len(c.Args) > 1: // of a session, the reason comes first
		f.add(c.Args[0], nil, ofUsers)
	}
}

// add adds an event. Without a type it is a warning. A reason may be one of a map. One that was
// handed over by another function is found there, and those of conditions are known.
func (f *eventFinder) add(reason, eventType ast.Expr, facts eventFacts) {
	if one, is := reason.(*ast.IndexExpr); is {
		all := source.Names(f.files, nameOf(one.X))
		for _, name := range all {
			f.add(ast.NewIdent(name), eventType, facts)
		}
		if len(all) > 0 {
			return
		}
	}
	name := nameOf(reason)
	if name == "reason" || name == "Reason" || name == "eventReason" || name == "recoveryReason" {
		return
	}
	value, known := f.constants[name]
	if !known {
		f.t.Errorf("the reason of an event is %q, which is no constant", name)
		return
	}
	e := f.event(value)
	switch nameOf(eventType) {
	case "EventTypeNormal":
		e.normal = true
	case "EventTypeWarning", "":
		e.warning = true
	default:
		f.t.Errorf("the type of the event %s is not known", value)
	}
	e.ofNode, e.ofClaim, e.ofPods = e.ofNode || facts.ofNode, e.ofClaim || facts.ofClaim, e.ofPods || facts.ofPods
}

// nameOf is the last part of a name, or that of what is called.
func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	case *ast.CallExpr:
		return nameOf(e.Fun)
	}
	return ""
}
