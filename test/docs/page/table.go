// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package page

import (
	"regexp"
	"strings"
	"testing"
	"time"
)

// Table is a table in Markdown.
type Table struct{ text strings.Builder }

// NewTable begins a table with the titles of its columns.
func NewTable(columns ...string) *Table {
	t := &Table{}
	t.Row(columns...)
	t.text.WriteString(strings.Repeat("|---", len(columns)) + "|\n")
	return t
}

// Row adds a row. Each cell is Markdown.
func (t *Table) Row(cells ...string) {
	t.text.WriteString("|")
	for _, cell := range cells {
		cell = strings.ReplaceAll(strings.Join(strings.Fields(cell), " "), "|", `\|`)
		t.text.WriteString(" " + cell + " |")
	}
	t.text.WriteString("\n")
}

// String is the table, with a line break at its end.
func (t *Table) String() string { return t.text.String() }

// Code is text as code. Nothing is the empty string in quotes.
func Code(text string) string {
	if text == "" {
		text = `""`
	}
	return "`" + text + "`"
}

// Codes are texts as code, with commas between them.
func Codes[T ~string](texts []T) string {
	all := make([]string, len(texts))
	for i, text := range texts {
		all[i] = Code(string(text))
	}
	return strings.Join(all, ", ")
}

// Duration is a time without the units that are zero: 20m and not 20m0s.
func Duration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

var separator = regexp.MustCompile(`(?m)^(\|---)+\|\n`)

// Rows are the cells of a table that is written by hand, without its head. The table is the
// one of the page with these titles of columns.
func Rows(t *testing.T, path string, columns ...string) [][]string {
	t.Helper()
	head := "| " + strings.Join(columns, " | ") + " |\n"
	_, rest, found := strings.Cut(Read(t, path), head)
	body := strings.TrimPrefix(rest, separator.FindString(rest))
	if !found || body == rest {
		t.Fatalf("%s has no table with the columns %q", path, columns)
	}
	var rows [][]string
	for line := range strings.Lines(body) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") {
			break
		}
		cells := strings.Split(strings.Trim(line, "|"), " | ")
		if len(cells) != len(columns) {
			t.Fatalf("%s: %d cells, want %d: %s", path, len(cells), len(columns), line)
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		rows = append(rows, cells)
	}
	return rows
}

var yamlBlock = regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$")

// Examples are the blocks of YAML of a page.
func Examples(t *testing.T, path string) []string {
	t.Helper()
	var all []string
	for _, found := range yamlBlock.FindAllStringSubmatch(Read(t, path), -1) {
		all = append(all, found[1])
	}
	return all
}
