// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/test/docs/page"
)

var update = flag.Bool("update", false, "rewrite the documentation")

// TestDocs writes all commands and flags into their page, or compares it.
func TestDocs(t *testing.T) {
	root := newCommand(genericiooptions.IOStreams{})
	root.InitDefaultHelpCmd()
	var text strings.Builder
	fmt.Fprintf(&text, "All commands have these flags:\n\n%s\n", flagTable(t, root.PersistentFlags()))
	documented := 0
	for _, group := range root.Groups() {
		for _, c := range root.Commands() {
			if c.GroupID == group.ID {
				documented += describe(t, &text, c)
			}
		}
	}
	if t.Logf("%d cases", documented); documented < 12 {
		t.Errorf("only %d commands", documented)
	}
	page.Generated(t, *update, "docs/reference/cli.md", text.String())
}

// describe describes a command and its sub-commands, and returns how many these are.
func describe(t *testing.T, text *strings.Builder, c *cobra.Command) int {
	t.Helper()
	if c.Short == "" {
		t.Errorf("%s is not described", c.CommandPath())
	}
	fmt.Fprintf(text, "### %s\n\n%s.\n\n", c.CommandPath(), c.Short)
	if c.Runnable() {
		fmt.Fprintf(text, "```\n%s\n```\n\n", c.UseLine())
	}
	flags := c.LocalNonPersistentFlags()
	if flags.HasAvailableFlags() {
		fmt.Fprintf(text, "%s\n", flagTable(t, flags))
	}
	documented := 1
	for _, sub := range c.Commands() {
		documented += describe(t, text, sub)
	}
	return documented
}

// defaultOf is the default of a flag.
func defaultOf(f *pflag.Flag) string {
	value := f.DefValue
	if d, err := time.ParseDuration(value); err == nil && f.Value.Type() == "duration" {
		value = page.Duration(d)
	}
	if value == "" || value == "[]" {
		return ""
	}
	return page.Code(value)
}

func flagTable(t *testing.T, flags *pflag.FlagSet) *page.Table {
	t.Helper()
	table := page.NewTable("flag", "type", "default", "meaning")
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		kind, usage := pflag.UnquoteUsage(f)
		if usage == "" {
			t.Errorf("the flag --%s is not described", f.Name)
		}
		name := page.Code("--" + f.Name)
		if f.Shorthand != "" {
			name = page.Code("-"+f.Shorthand) + ", " + name
		}
		if kind == "" {
			kind = f.Value.Type()
		}
		table.Row(name, kind, defaultOf(f), strings.TrimSuffix(usage, "."))
	})
	return table
}
