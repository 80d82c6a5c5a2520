// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"testing"

	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/test/docs/snippet"
)

// accept returns what the command tree finds wrong with arguments.
func accept(args []string) error {
	root := newCommand(genericiooptions.IOStreams{In: &bytes.Buffer{}, Out: &bytes.Buffer{}, ErrOut: &bytes.Buffer{}})
	root.InitDefaultHelpFlag()
	root.InitDefaultVersionFlag()
	root.InitDefaultHelpCmd()
	c, rest, err := root.Find(args)
	if err != nil {
		return fmt.Errorf("find the command: %w", err)
	}
	c.InitDefaultHelpFlag()
	if err := c.ParseFlags(rest); err != nil {
		return fmt.Errorf("parse the flags of %s: %w", c.CommandPath(), err)
	}
	positional := c.Flags().Args()
	if c.HasSubCommands() && len(positional) > 0 {
		return fmt.Errorf("%s has no command %s", c.CommandPath(), positional[0])
	}
	// A page may show a command without its arguments.
	if err := c.ValidateArgs(positional); err != nil && len(positional) > 0 {
		return fmt.Errorf("arguments of %s: %w", c.CommandPath(), err)
	}
	return nil
}

var documented = snippet.Checker{
	Command: []string{"kubectl", "gpu"},
	Accept:  func(args []string) error { return accept(args[2:]) },
}

// TestSnippets: commands in the documentation, with their flags, are those of this program.
func TestSnippets(t *testing.T) {
	const least = 30
	documented.Pages(t, "../..", least)
}

// TestBrokenSnippets: a page with a wrong command fails.
func TestBrokenSnippets(t *testing.T) {
	documented.Lines(t, map[string]bool{
		"kubectl gpu tree -A":                      true,
		"kubectl gpu explain llm -n team":          true,
		"bin/cluster run -- kubectl gpu top nodes": true,
		"kubectl gpu options":                      false,
		"kubectl gpu three":                        false,
		"kubectl gpu tree --no-such-flag":          false,
		"kubectl gpu migrate nothing file.yaml":    false,
		"kubectl gpu slices --count many":          false,
	})
}
