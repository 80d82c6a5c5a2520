// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package finding holds what a migration tells about the fields that it read: which of
// them are not in the result, and which work differently there.
package finding

import (
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// Kind is what became of a field.
type Kind string

const (
	// Lost is a field whose meaning is not in the result.
	Lost Kind = "not translated"
	// Unread is a field that the program which it is written for ignores as well.
	Unread Kind = "ignored before, too"
	// Changed is a field that is translated into something that works differently.
	Changed Kind = "works differently"
	// Kept is a field that stays as it is, and works.
	Kept Kind = "kept"
)

// maxLine bounds what is said of one field.
const maxLine = 600

// Finding is what became of one field.
type Finding struct {
	Kind Kind
	// Path is the path of the field in what was read.
	Path string
	// Value is the field's value as it is written, "" for one that says nothing by itself.
	Value string
	// Why says why, and what can be done.
	Why string
}

// String returns one line without control characters, so that it can be a comment.
func (f Finding) String() string {
	return quote.Line(fmt.Sprintf("%s: %s: %s", f.Kind, f.what(), f.Why), maxLine)
}

// what is the field, with its value if it has one.
func (f Finding) what() string {
	what := quote.Line(f.Path, maxLine)
	if f.Value != "" {
		what += " = " + quote.Short(quote.Line(f.Value, maxLine))
	}
	return what
}

// List collects findings in the order of what was read.
type List []Finding

// Lost adds a field that is not translated.
func (l *List) Lost(path, value, why string) { l.add(Lost, path, value, why) }

// Unread adds a field that was ignored before as well.
func (l *List) Unread(path, value, why string) { l.add(Unread, path, value, why) }

// Changed adds a field that works differently.
func (l *List) Changed(path, value, why string) { l.add(Changed, path, value, why) }

// Kept adds a field that stays as it is.
func (l *List) Kept(path, value, why string) { l.add(Kept, path, value, why) }

func (l *List) add(kind Kind, path, value, why string) {
	f := Finding{Kind: kind, Path: path, Value: value, Why: why}
	if !slices.Contains(*l, f) {
		*l = append(*l, f)
	}
}

// Ignored counts the fields that are not in the result.
func (l *List) Ignored() (n int) {
	for _, f := range *l {
		if f.Kind == Lost || f.Kind == Unread {
			n++
		}
	}
	return n
}

// Lines returns the findings for people: what is said of several fields is said once, above these.
func (l *List) Lines() (lines []string) {
	of := map[[2]string][]Finding{}
	for _, f := range *l {
		reason := [2]string{string(f.Kind), f.Why}
		of[reason] = append(of[reason], f)
	}
	for _, f := range *l {
		switch same := of[[2]string{string(f.Kind), f.Why}]; {
		case same[0] != f:
		case len(same) == 1:
			lines = append(lines, "* "+f.String())
		default:
			lines = append(lines, "* "+quote.Line(fmt.Sprintf("%s: %s:", f.Kind, f.Why), maxLine))
			for _, one := range same {
				lines = append(lines, "    "+quote.Line(one.what(), maxLine))
			}
		}
	}
	return lines
}

// Comment returns the findings as comments in YAML, under a title.
func (l *List) Comment(title string) string {
	var text strings.Builder
	text.WriteString("# " + title + "\n")
	for _, line := range l.Lines() {
		text.WriteString("# " + line + "\n")
	}
	return text.String() + "\n"
}
