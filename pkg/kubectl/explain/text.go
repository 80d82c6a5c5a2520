// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

// List are the explanations of several objects.
type List struct {
	metav1.TypeMeta `json:",inline"`

	Items []*Explanation `json:"items"`
}

// View shows explanations to people.
func View(all ...*Explanation) *printer.Text {
	text := &printer.Text{}
	for _, e := range all {
		text.Named = append(text.Named, strings.ToLower(e.Subject.Kind)+"/"+e.Subject.Name)
	}
	text.Render = func(w *bytes.Buffer, f printer.Format) error {
		p := &page{w, f}
		if len(all) == 0 {
			p.line("No pod that can be read waits for devices, or is stuck with them.")
		}
		for i, a := range together(all, printer.Format{Wide: f.Wide}) {
			if i > 0 {
				p.line("")
			}
			p.explanation(a[0], a)
		}
		return nil
	}
	return text
}

// mostLines is how much of a list is shown unless the output is wide.
const mostLines = 5

// page is the text of an explanation.
type page struct {
	text   *bytes.Buffer
	format printer.Format
}

func (p *page) line(format string, a ...any) { p.painted(printer.Plain, fmt.Sprintf(format, a...)) }

func (p *page) title(s printer.Style, text string) { p.painted(s, text) }

// painted writes a text, and breaks its lines where the format has a width.
func (p *page) painted(s printer.Style, text string) {
	for line := range strings.SplitSeq(text, "\n") {
		for _, part := range broken(line, p.format.Width) {
			p.text.WriteString(p.format.Paint(s, part) + "\n")
		}
	}
}

// broken breaks a line between words. What goes on is indented. A command stays in one piece, so that it can be copied.
func broken(line string, width int) (lines []string) {
	text := strings.TrimLeft(line, " ")
	indent := line[:len(line)-len(text)]
	words, now := strings.Split(text, " "), indent
	for i := 0; i < len(words) && len([]rune(line)) > width && width > 0; i++ {
		piece := words[i]
		if strings.HasSuffix(piece, "kubectl") {
			piece, i = strings.Join(words[i:], " "), len(words)
		}
		switch is := strings.TrimSpace(now); {
		case is == "":
			now += piece
		case is != "-" && len([]rune(now+" "+piece)) > width:
			lines, now = append(lines, now), indent+"  "+piece
		default:
			now += " " + piece
		}
	}
	if now == indent {
		now = line
	}
	return append(lines, now)
}

// headlines say how something is.
var headlines = map[Verdict]struct {
	text  string
	style printer.Style
}{
	Allocated:   {"has its devices.", printer.Good},
	Allocatable: {"can be allocated now.", printer.Good},
	Waits:       {unallocated, printer.Bad},
	Starting:    {"has its devices, and is starting.", printer.Good},
	IsStuck:     {"has its devices, but its containers do not start.", printer.Bad},
	Unknown:     {"may wait or not: that is unknown.", printer.Warn},
	Finished:    {"has ended, and needs its devices no more.", printer.Plain},
	NoDevices:   {"asks for no devices.", printer.Plain},
}

// headline returns that of an explanation: for what waits, the first reason decides.
func headline(e *Explanation) (string, printer.Style) {
	h := headlines[e.Verdict]
	switch {
	case e.Subject.Kind == kindNamespace:
		h.text = "may have pods that wait: that is unknown."
	case slices.ContainsFunc(e.Stuck, func(c stuck.Cause) bool { return c.Kind == stuck.Terminating }):
		h.text = "should have ended, and has not."
	case (e.Verdict == Finished || e.Verdict == Allocated) && len(e.Reasons) > 0:
		h.text, h.style = causeGroups[group(e.Reasons[0].Cause)].headline, printer.Warn
	case e.Verdict == Allocated && slices.ContainsFunc(e.Allocations, func(a Allocation) bool { return len(a.Problems) > 0 }):
		h.text, h.style = "has its devices, and some are tainted or not published any more.", printer.Warn
	case len(e.Allocations) == 0 && e.Verdict == IsStuck:
		h.text = "has a node, but not its devices."
	case e.Verdict == Waits && len(e.Reasons) > 0:
		h.text = causeGroups[group(e.Reasons[0].Cause)].headline
		if whole, n := choicesOf(e.Reasons); n > 1 && !slices.ContainsFunc(e.Reasons[:whole], func(r Reason) bool { return group(r.Cause) != group(Held) }) {
			h.text = fmt.Sprintf("waits: all %d alternatives are taken.", n)
		}
	}
	return h.text, h.style
}

// choicesOf returns how many of the first reasons are those of one request's alternatives, and of how many of these.
func choicesOf(reasons []Reason) (whole, alternatives int) {
	first, seen := reasons[0], sets.New[string]()
	for _, r := range reasons {
		if !resourceclaim.IsSubRequestRef(first.Request) || base(r) != base(first) || r.Claim != first.Claim {
			break
		}
		seen.Insert(r.Request)
		whole++
	}
	return whole, seen.Len()
}

// base is the request that a reason is about, without the alternative.
func base(r Reason) string { return resourceclaim.BaseRequestRef(r.Request) }

// reasonTexts are the reasons, those of the alternatives of a request together.
func reasonTexts(reasons []Reason) []string {
	var out []string
	for len(reasons) > 0 {
		whole, n := choicesOf(reasons)
		r, text := reasons[0], oneLine(reasons[0].Text)
		switch {
		case n > 1:
			text = fmt.Sprintf("none of the %d alternatives of request %s of claim %s can be allocated:", n, base(r), r.Claim)
			for _, r := range reasons[:whole] {
				text += fmt.Sprintf("\n    %s: %s", strings.TrimPrefix(r.Request, base(r)+"/"), oneLine(r.Text))
			}
		case r.Request != "":
			text += fmt.Sprintf(" (claim %s, request %s)", r.Claim, r.Request)
			fallthrough
		default:
			whole = 1
		}
		out, reasons = append(out, text), reasons[whole:]
	}
	return out
}

func (p *page) explanation(e *Explanation, all alike) {
	text, style := headline(e)
	kind, name := e.Subject.Kind, e.Subject.Name
	switch {
	case e.Subject.Namespace != "":
		name = e.Subject.Namespace + "/" + name
	case name == "":
		kind, name = "All", "namespaces"
	}
	p.title(style, fmt.Sprintf("%s %s %s", kind, name, text))
	if len(all) > 1 {
		p.line("%s", all.others(p.format.Wide))
	}
	if len(e.FitsOn) > 0 && e.Verdict == Allocatable {
		p.line("It fits on %s.", nodesText(e.FitsOn))
	}
	asIs := func(text string) string { return text }
	section(p, "Why", e.Stuck, causeText)
	section(p, "Devices", e.Allocations, Allocation.text)
	if e.Verdict == Unknown || len(e.Reasons) > 0 && e.Reasons[0].Cause == NotScheduled {
		section(p, "Not looked at", e.Unseen, oneLine)
	}
	section(p, "Why", reasonTexts(e.Reasons), asIs)
	section(p, "In the way", e.InTheWay, Holder.text)
	help := "What would help"
	if len(e.Unseen) > 0 {
		help += ", as far as can be seen"
	}
	section(p, help, e.Suggestions, e.suggestionText)
	if e.Verdict == Waits && len(e.Suggestions) == 0 && e.onlyDevices() {
		p.line("")
		p.line("No single change was found that would help.")
	}
	section(p, "Notes", e.Notes, oneLine)
	if p.format.Wide {
		section(p, "Assumed", e.Assumptions, asIs)
	}
}

func (e *Explanation) suggestionText(s Suggestion) string {
	if s.Node == "" || s.Kind == ChangeNode {
		return oneLine(s.Text)
	}
	fits, but := e.may("fits")
	return fmt.Sprintf("%s: it %s on node %s%s", oneLine(s.Text), fits, s.Node, but)
}

// may makes of "fits" that it may fit, and why it may not, where something was not looked at that could contradict it.
func (e *Explanation) may(fits string) (verb, but string) {
	switch {
	case len(e.Unseen) == 0:
		return fits, ""
	case slices.Contains(e.Unseen, claimsHidden):
		return "may fit", ", but claims of others are unknown"
	}
	return "may fit", ", but not everything could be looked at"
}

// atMost is said before numbers of what is free as far as can be seen.
func (e *Explanation) atMost() string {
	if len(e.Unseen) > 0 {
		return "at most "
	}
	return ""
}

func section[T any](p *page, title string, all []T, text func(T) string) {
	for i, one := range all {
		if i == 0 {
			p.line("")
			p.title(printer.Bold, title+":")
		}
		if i == mostLines && len(all) > mostLines+1 && !p.format.Wide {
			p.line("  - and %d more (-o wide)", len(all)-i)
			return
		}
		p.line("  - %s", text(one))
	}
}

func (h Holder) text() string {
	text := fmt.Sprintf("claim %s/%s has %s on node %s", h.Namespace, h.Claim, printer.Some(h.Devices, mostLines), h.Node)
	if h.For != nil {
		text += " since " + printer.Age(h.For.Duration)
	}
	if len(h.Pods) == 0 {
		return text + ", no pod uses it"
	}
	return text + ", used by " + plural(len(h.Pods), "pod ", "pods ") + printer.Some(h.Pods, mostLines)
}

func causeText(c stuck.Cause) string {
	// Lines of others could look like ours.
	text := oneLine(c.Text)
	if c.Times > 1 {
		text += fmt.Sprintf(" (%d times)", c.Times)
	}
	if c.Remedy != "" {
		text += "\n    Remedy: " + c.Remedy
	}
	return text
}

func (a Allocation) text() string {
	text := fmt.Sprintf("request %s of claim %s has %s", a.Request, a.Claim, a.Device)
	if a.Node != "" {
		text += " on node " + a.Node
	}
	if a.Profile != "" {
		text += ", profile " + a.Profile
	}
	if len(a.Placement) > 0 {
		text += fmt.Sprintf(", memory slices %v", a.Placement)
	}
	for _, name := range sets.List(sets.KeySet(a.Share)) {
		text += fmt.Sprintf(", %s %s", name, a.Share[name])
	}
	if a.AdminAccess {
		text += ", with admin access"
	}
	for _, problem := range a.Problems {
		text += "\n    " + oneLine(problem)
	}
	for _, c := range a.Conditions {
		text += fmt.Sprintf("\n    %s=%s", c.Type, c.Status)
		if c.Message != "" {
			text += ": " + oneLine(c.Message)
		}
	}
	return text
}

// nodesText names some nodes.
func nodesText(names []string) string {
	const some = 3
	switch {
	case len(names) == 1:
		return "node " + names[0]
	case len(names) <= some:
		return "nodes " + strings.Join(names, ", ")
	default:
		return fmt.Sprintf("%d nodes (%s, ...)", len(names), strings.Join(names[:some], ", "))
	}
}
