// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package printer

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/partage-dev/partage/pkg/kubectl/options"
)

// Format is what the output can show, and how much of it was asked for.
type Format struct {
	// Color says that colours may be written.
	Color bool
	// Wide is -o wide, NoHeaders --no-headers.
	Wide, NoHeaders bool
	// Width is where lines of sentences end, 0 for anywhere.
	Width int
}

// Style is how a text looks where colours may be used.
type Style string

// Styles, by what they mean.
const (
	Plain Style = ""
	Good  Style = "32"
	Warn  Style = "33"
	Bad   Style = "31"
	Faint Style = "2"
	Bold  Style = "1"
)

// Paint returns the text in the style, if colours may be used.
func (f Format) Paint(s Style, text string) string {
	if !f.Color || s == Plain || text == "" {
		return text
	}
	return options.Styled(string(s), text)
}

// Column is one of a table.
type Column struct {
	Name string
	// Wide columns are shown with -o wide only, and Hidden ones never.
	Wide, Hidden bool
}

// Columns returns columns. Those whose name begins with + are shown with -o wide only.
func Columns(names ...string) []Column {
	columns := make([]Column, len(names))
	for i, n := range names {
		columns[i].Name, columns[i].Wide = strings.CutPrefix(n, "+")
	}
	return columns
}

// Row is one of a table.
type Row struct {
	Cells []string
	// Name is what -o name prints of it, "" for nothing.
	Name string
	// Style is that of the line.
	Style Style
}

// Table is a View in rows and columns.
type Table struct {
	Columns []Column
	Rows    []Row
	// Empty is written instead of a table without rows, such as "No claims found."
	Empty string
}

// Names returns those of the rows, each once.
func (t *Table) Names() []string {
	var names []string
	for _, r := range t.Rows {
		if r.Name != "" && !slices.Contains(names, r.Name) {
			names = append(names, r.Name)
		}
	}
	return names
}

// Write writes the table as kubectl does.
func (t *Table) Write(w io.Writer, f Format) error { return (&Text{Render: t.Render}).Write(w, f) }

// Render writes the table where it is a part of a text.
func (t *Table) Render(out *bytes.Buffer, f Format) error {
	if len(t.Rows) == 0 {
		if t.Empty != "" {
			out.WriteString(t.Empty + "\n")
		}
		return nil
	}
	var lines bytes.Buffer
	columns := printers.GetNewTabWriter(&lines)
	write := func(cell func(i int) string) {
		var cells []string
		for i, c := range t.Columns {
			if !c.Hidden && (f.Wide || !c.Wide) {
				cells = append(cells, cell(i))
			}
		}
		fmt.Fprintln(columns, strings.Join(cells, "\t"))
	}
	if !f.NoHeaders {
		write(func(i int) string { return strings.ToUpper(t.Columns[i].Name) })
	}
	for _, r := range t.Rows {
		write(func(i int) string { return oneLine(r.Cells[i]) })
	}
	if err := columns.Flush(); err != nil {
		return fmt.Errorf("print a table: %w", err)
	}
	// The first line is the header, if there is one. Colours come last: the columns are aligned by bytes.
	number := 0
	if f.NoHeaders {
		number = 1
	}
	for line := range strings.Lines(lines.String()) {
		style := Plain
		if number > 0 {
			style = t.Rows[number-1].Style
		}
		out.WriteString(f.Paint(style, strings.TrimRight(line, " \n")) + "\n")
		number++
	}
	return nil
}

// oneLine returns the first line of a cell, such that it is as wide as it will be.
func oneLine(cell string) string {
	if at := strings.IndexAny(cell, "\f\n\r\t\v"); at >= 0 {
		cell = cell[:at] + "..."
	}
	return printers.EscapeTerminal(cell)
}

// Text is a View in free form.
type Text struct {
	// Render writes it.
	Render func(out *bytes.Buffer, f Format) error
	// Named is what -o name prints.
	Named []string
}

// Names returns Named.
func (t *Text) Names() []string { return t.Named }

// Write calls Render. What it writes is safe for terminals.
func (t *Text) Write(w io.Writer, f Format) error {
	var out bytes.Buffer
	if err := t.Render(&out, f); err != nil {
		return err
	}
	_, err := out.WriteTo(options.Safe(w))
	return err
}

// Unknown is written for what is not known, or does not exist.
const Unknown = "-"

func orUnknown[T any](value *T, text func(T) string) string {
	if value == nil {
		return Unknown
	}
	return text(*value)
}

// BytesOrUnknown writes a size that may not be known.
func BytesOrUnknown(n *int64) string { return orUnknown(n, Bytes) }

// PercentOrUnknown writes a ratio that may not be known.
func PercentOrUnknown(ratio *float64) string {
	return orUnknown(ratio, func(ratio float64) string { return fmt.Sprintf("%.0f%%", ratio*100) })
}

// SecondsOrUnknown writes a duration that may not be known.
func SecondsOrUnknown(seconds *float64) string { return orUnknown(seconds, Seconds) }

// AtLeast writes a duration that may be longer, or may not be known.
func AtLeast(seconds *float64, longer bool) string {
	if seconds != nil && longer {
		return "≥" + Seconds(*seconds)
	}
	return SecondsOrUnknown(seconds)
}

// IdleForLonger explains "≥" where times are idle ones.
const IdleForLonger = "≥: since the driver's pod was started; whether it was idle before is unknown."

// Seconds writes a duration, as kubectl writes ages.
func Seconds(n float64) string {
	return duration.HumanDuration(time.Duration(n * float64(time.Second)))
}

// Bytes writes a size as manifests do, in the largest unit that shows it with a decimal at most.
func Bytes(n int64) string {
	const gi = 1 << 30
	if n >= gi {
		return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(n)/gi), ".0") + "Gi"
	}
	return resource.NewQuantity((n+1<<20-1)>>20<<20, resource.BinarySI).String()
}

// Age returns how long something has been, as kubectl prints it. What another clock dates later than now has just been.
func Age(d time.Duration) string { return duration.HumanDuration(max(d, 0)) }

// Some writes the first of some names, and how many there are beside.
func Some(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
