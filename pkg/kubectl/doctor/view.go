// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// maxObjects is how many objects of a finding are shown without -o wide.
const maxObjects = 5

// marks of severities.
var marks = map[Severity]struct {
	style printer.Style
	mark  string
}{Error: {printer.Bad, "✖"}, Warning: {printer.Warn, "▲"}, Unknown: {printer.Faint, "?"}, Note: {printer.Faint, "•"}, OK: {printer.Good, "✔"}}

type writer struct {
	*bytes.Buffer
	printer.Format
	now time.Time
}

// view shows a report: the worst findings first, and what is over or in order in short.
func view(r *Report, history bool) printer.View {
	return &printer.Text{
		Render: func(to *bytes.Buffer, f printer.Format) error {
			w := writer{to, f, r.now}
			for _, s := range []Severity{Error, Warning} {
				r.each(s, func(c Result, one Finding) { w.finding(c.ID, &one) })
			}
			w.unknown(r)
			r.each(Note, func(c Result, one Finding) { w.finding(c.ID, &one) })
			if n := len(r.History); n > 0 && !history {
				fmt.Fprintf(w, "%s %s, over (--history)\n", w.mark(OK), count(n, "past incident"))
			} else if n > 0 {
				w.WriteString("Over:\n")
				for _, h := range r.History {
					fmt.Fprintf(w, "    %s  %s: %s\n", w.span(&h), objects(h.Objects, w.Wide), strings.TrimRight(cmp.Or(h.Said, h.Message), ". "))
				}
			}
			w.summary(r)
			return nil
		},
		Named: r.names(),
	}
}

// names returns the checks that have found something.
func (r *Report) names() []string {
	var names []string
	for _, c := range r.Checks {
		if c.Severity != OK {
			names = append(names, "check/"+c.ID)
		}
	}
	return names
}

// each visits the findings of a severity.
func (r *Report) each(s Severity, visit func(Result, Finding)) {
	for _, c := range r.Checks {
		for _, finding := range c.Findings {
			if finding.Severity == s {
				visit(c, finding)
			}
		}
	}
}

// unknown names all checks that lack the same at once.
func (w *writer) unknown(r *Report) {
	var reasons findings
	ids := map[string][]string{}
	r.each(Unknown, func(c Result, one Finding) {
		ids[one.Message] = append(ids[one.Message], c.ID)
		reasons.add(Unknown, one.Message, one.Remedy, one.Objects...)
	})
	for i := range reasons {
		w.finding(strings.Join(ids[reasons[i].Message], ", "), &reasons[i])
	}
}

func (w *writer) mark(s Severity) string { return w.Paint(marks[s].style, marks[s].mark) }

// finding writes one: what has it, since when, what it is, whom it affects, and what to do.
func (w *writer) finding(check string, f *Finding) {
	head := w.Paint(printer.Bold, check)
	if len(f.Objects) > 0 {
		head = w.Paint(printer.Bold, objects(f.Objects, w.Wide))
		if check != "" {
			head += "  " + w.Paint(printer.Faint, check)
		}
	}
	if f.Since != nil {
		head += "  for " + printer.Age(w.now.Sub(f.Since.Time))
	}
	if f.Last != nil {
		head += "  told " + printer.Age(w.now.Sub(f.Last.Time)) + " ago"
	}
	fmt.Fprintf(w, "%s %s\n", w.mark(f.Severity), head)
	w.line("", f.Message+".")
	w.line("", f.Said)
	if len(f.Pods) > 0 {
		w.line("", "affects "+objects(f.Pods, w.Wide))
	}
	for _, c := range f.Commands {
		w.line("", c)
	}
	w.line("-> ", f.Remedy)
	w.WriteByte('\n')
}

// span says when something was that is over.
func (w *writer) span(f *Finding) string {
	text := printer.Age(w.now.Sub(f.Since.Time))
	if f.Until != nil {
		text += "–" + printer.Age(w.now.Sub(f.Until.Time))
	}
	return text + " ago"
}

func (w *writer) line(arrow, text string) {
	if text = strings.TrimRight(text, ". "); text != "" {
		fmt.Fprintf(w, "    %s%s\n", arrow, text)
	}
}

// summary says how much was looked at, and what was found.
func (w *writer) summary(r *Report) {
	if w.Wide {
		for _, c := range r.Checks {
			if c.Severity == OK {
				fmt.Fprintf(w, "%s %s: %s\n", w.mark(OK), c.ID, c.Title)
			}
		}
	}
	problems, affected := 0, map[Ref]bool{}
	for _, s := range []Severity{Error, Warning} {
		r.each(s, func(_ Result, f Finding) {
			problems++
			for _, o := range append(f.Pods, f.Objects...) {
				affected[o] = true
			}
		})
	}
	kinds := map[string]int{}
	for o := range affected {
		kinds[o.Kind]++
	}
	text := fmt.Sprintf("%s %d of %s found nothing; %s", w.mark(OK), r.Count(OK), count(len(r.Checks), "check"), count(problems, "problem"))
	for _, kind := range []string{"gpu", "node", "pod"} {
		if n := kinds[kind]; n > 0 {
			text += ", " + count(n, strings.Replace(kind, "gpu", "GPU", 1))
		}
	}
	if n := r.Count(Unknown); n > 0 {
		text += fmt.Sprintf("; %d unknown", n)
	}
	fmt.Fprintln(w, text)
}

func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// objects lists objects, those of one kind after its name.
func objects(all []Ref, wide bool) string {
	names := make([]string, len(all))
	for i, o := range all {
		if names[i] = o.String(); i > 0 && all[i-1].Kind == o.Kind {
			names[i] = strings.TrimPrefix(names[i], o.Kind+" ")
		}
	}
	if wide {
		return strings.Join(names, ", ")
	}
	return printer.Some(names, maxObjects)
}
