// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package flags writes down the flags of the commands that run on nodes, from their
// definitions.
package flags

import (
	"fmt"
	"strings"
	"testing"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/docs/page"
)

// Markdown describes a command and its sub-commands. A flag without a description fails the
// test.
func Markdown(t *testing.T, root *cli.Command) string {
	t.Helper()
	var text strings.Builder
	fmt.Fprintf(&text, "%s.\n\n", upper(root.Usage))
	text.WriteString(tables(t, root.Flags))
	for _, c := range root.Commands {
		if c.Hidden {
			continue
		}
		fmt.Fprintf(&text, "### %s %s\n\n%s.\n\n", root.Name, strings.TrimSpace(c.Name+" "+c.ArgsUsage), upper(c.Usage))
		text.WriteString(tables(t, c.Flags))
	}
	return text.String()
}

// tables has one table for each category, in the order in which they come first.
func tables(t *testing.T, flags []cli.Flag) string {
	t.Helper()
	var categories []string
	byCategory := map[string]*page.Table{}
	for _, f := range flags {
		category := ""
		if c, has := f.(cli.CategorizableFlag); has {
			category = c.GetCategory()
		}
		if byCategory[category] == nil {
			categories = append(categories, category)
			byCategory[category] = page.NewTable("flag", "variable", "type", "default", "meaning")
		}
		byCategory[category].Row(cells(t, f)...)
	}
	var text strings.Builder
	for _, category := range categories {
		if category != "" {
			fmt.Fprintf(&text, "**%s**\n\n", category)
		}
		fmt.Fprintf(&text, "%s\n", byCategory[category])
	}
	return text.String()
}

func cells(t *testing.T, f cli.Flag) []string {
	t.Helper()
	doc, is := f.(cli.DocGenerationFlag)
	if !is || doc.GetUsage() == "" {
		t.Fatalf("the flag %s is not described", f.Names()[0])
	}
	var names []string
	for _, name := range f.Names() {
		if len(name) == 1 {
			name = "`-" + name + "`"
		} else {
			name = "`--" + name + "`"
		}
		names = append(names, name)
	}
	kind, value := doc.TypeName(), strings.Trim(doc.GetValue(), `"`)
	if d, is := f.(*cli.DurationFlag); is {
		kind, value = "duration", page.Duration(d.Value)
	}
	if value != "" {
		value = page.Code(value)
	}
	return []string{strings.Join(names, ", "), page.Codes(doc.GetEnvVars()), kind, value, doc.GetUsage()}
}

func upper(text string) string {
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + text[1:]
}
