// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// maxObjects is how many objects of a finding are shown without -o wide.
const maxObjects = 5

var severityStyle = map[Severity]printer.Style{Error: printer.Bad, Warning: printer.Warn, Unknown: printer.Faint, OK: printer.Good}

// view shows a report: the worst findings first, and what is in order in short.
func view(r *Report) printer.View {
	return &printer.Text{
		Render: func(w io.Writer, f printer.Format) error {
			var out bytes.Buffer
			for _, s := range []Severity{Error, Warning} {
				r.each(s, func(c Result, finding Finding) { writeFinding(&out, f, c.ID, finding) })
			}
			writeUnknown(&out, f, r)
			writeOK(&out, f, r)
			fmt.Fprintf(&out, "%d checks: %d with errors, %d with warnings, %d unknown, %d ok.\n",
				len(r.Checks), r.Count(Error), r.Count(Warning), r.Count(Unknown), r.Count(OK))
			_, err := out.WriteTo(w)
			return err
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

// writeUnknown names all checks that lack the same at once.
func writeUnknown(out *bytes.Buffer, f printer.Format, r *Report) {
	var reasons findings
	r.each(Unknown, func(c Result, finding Finding) {
		reasons.add(Unknown, finding.Message, finding.Remedy, append([]Ref{{Name: c.ID}}, finding.Objects...)...)
	})
	for _, reason := range reasons {
		var ids []string
		finding := Finding{Severity: Unknown, Message: reason.Message, Remedy: reason.Remedy}
		for _, o := range reason.Objects {
			if o.Kind == "" {
				ids = append(ids, o.Name)
			} else {
				finding.Objects = append(finding.Objects, o)
			}
		}
		writeFinding(out, f, strings.Join(ids, ", "), finding)
	}
}

func writeFinding(out *bytes.Buffer, f printer.Format, checks string, finding Finding) {
	fmt.Fprintf(out, "%s  %s\n", f.Paint(severityStyle[finding.Severity], fmt.Sprintf("%-7s", strings.ToUpper(string(finding.Severity)))), f.Paint(printer.Bold, checks))
	if len(finding.Objects) > 0 {
		fmt.Fprintf(out, "         %s\n", objects(finding.Objects, f.Wide))
	}
	fmt.Fprintf(out, "         %s.\n", strings.TrimRight(finding.Message, "."))
	fmt.Fprintf(out, "         -> %s.\n\n", strings.TrimRight(finding.Remedy, "."))
}

// objects lists objects, those of one kind after its name.
func objects(all []Ref, wide bool) string {
	shown := all
	if !wide && len(all) > maxObjects {
		shown = all[:maxObjects]
	}
	var text strings.Builder
	for i, o := range shown {
		switch {
		case i > 0 && shown[i-1].Kind == o.Kind:
			text.WriteString(", " + strings.TrimPrefix(o.String(), o.Kind+" "))
		case i > 0:
			text.WriteString(", " + o.String())
		default:
			text.WriteString(o.String())
		}
	}
	if more := len(all) - len(shown); more > 0 {
		fmt.Fprintf(&text, " and %d more", more)
	}
	return text.String()
}

// lineWidth is that of the list of checks that are in order.
const lineWidth = 100

func writeOK(out *bytes.Buffer, f printer.Format, r *Report) {
	if r.Count(OK) == 0 {
		return
	}
	fmt.Fprintf(out, "%s", f.Paint(printer.Good, fmt.Sprintf("%-7s", "OK")))
	column := lineWidth // the first goes to this line all the same
	first := true
	for _, c := range r.Checks {
		if c.Severity != OK {
			continue
		}
		switch {
		case f.Wide && first:
			fmt.Fprintf(out, "  %s: %s", c.ID, c.Title)
		case f.Wide:
			fmt.Fprintf(out, "\n         %s: %s", c.ID, c.Title)
		case first:
			fmt.Fprintf(out, "  %s", c.ID)
			column = len(c.ID)
		case column+len(c.ID) > lineWidth:
			fmt.Fprintf(out, ",\n         %s", c.ID)
			column = len(c.ID)
		default:
			fmt.Fprintf(out, ", %s", c.ID)
			column += len(c.ID) + len(", ")
		}
		first = false
	}
	out.WriteString("\n\n")
}
