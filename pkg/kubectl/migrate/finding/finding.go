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
	// Needed is what the result does not do by itself.
	Needed Kind = "also needed"
)

// maxLine bounds what is said of one field.
const maxLine = 600

// Finding is what became of one field: its path in what was read, its value as it is written, "" for one that says nothing by itself, why, and
// what can be done.
type Finding struct {
	Kind             Kind
	Path, Value, Why string
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

// Add tells what became of a field, once.
func (l *List) Add(kind Kind, path, value, why string) {
	if f := (Finding{kind, path, value, why}); !slices.Contains(*l, f) {
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

// Lines returns the findings for people, without control characters, so that they can be comments. What is said of several fields is said
// once, above these.
func (l *List) Lines() (lines []string) {
	told := map[Finding]bool{}
	for _, f := range *l {
		of := Finding{Kind: f.Kind, Why: f.Why}
		if told[of] {
			continue
		}
		told[of] = true
		same := slices.DeleteFunc(slices.Clone(*l), func(o Finding) bool { return o.Kind != f.Kind || o.Why != f.Why })
		if len(same) == 1 {
			lines = append(lines, "* "+quote.Line(fmt.Sprintf("%s: %s: %s", f.Kind, f.what(), f.Why), maxLine))
			continue
		}
		lines = append(lines, "* "+quote.Line(fmt.Sprintf("%s: %s:", f.Kind, f.Why), maxLine))
		for _, one := range same {
			lines = append(lines, "    "+quote.Line(one.what(), maxLine))
		}
	}
	return lines
}

// Comment returns the findings as comments in YAML, under a title.
func (l *List) Comment(title string) string {
	return "# " + strings.Join(append([]string{title}, l.Lines()...), "\n# ") + "\n\n"
}
