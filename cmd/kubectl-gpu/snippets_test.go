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

// TestSnippets: commands in the documentation, with their flags, are those of this program.
func TestSnippets(t *testing.T) {
	commands, err := snippet.All("../..", "kubectl")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, c := range commands {
		if len(c.Args) < 3 || c.Args[1] != "gpu" {
			continue
		}
		seen++
		if err := accept(c.Args[2:]); err != nil && !snippet.Unfinished(err) {
			t.Errorf("%v: %v", c, err)
		}
	}
	if t.Logf("%d cases", seen); seen < 30 {
		t.Errorf("only %d commands", seen)
	}
}

// TestBrokenSnippets: a page with a wrong command fails.
func TestBrokenSnippets(t *testing.T) {
	for text, want := range map[string]bool{
		"kubectl gpu tree -A":                      true,
		"kubectl gpu explain llm -n team":          true,
		"bin/cluster run -- kubectl gpu top nodes": true,
		"kubectl gpu options":                      false,
		"kubectl gpu three":                        false,
		"kubectl gpu tree --no-such-flag":          false,
		"kubectl gpu migrate nothing file.yaml":    false,
		"kubectl gpu slices --count many":          false,
	} {
		commands, err := snippet.Commands("page.md", "text\n\n```sh\n"+text+"\n```\n")
		if err != nil || len(commands) == 0 {
			t.Fatalf("%s: %d commands, %v", text, len(commands), err)
		}
		err = accept(commands[len(commands)-1].Args[2:])
		if (err == nil) != want {
			t.Errorf("%s: %v", text, err)
		}
	}
}
