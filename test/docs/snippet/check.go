// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package snippet

import (
	"slices"
	"testing"
)

// Checker compares commands in the documentation with a program's own definition.
type Checker struct {
	// Command are the words that the program's commands begin with.
	Command []string
	// Accept returns what the program finds wrong with the words from the first of Command on.
	Accept func(args []string) error
}

// Pages checks the commands of all pages. Fewer than least is an error: a search that finds none
// checks nothing.
func (c Checker) Pages(t *testing.T, root string, least int) {
	t.Helper()
	commands, err := All(root, c.Command[0])
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, command := range commands {
		if n := len(c.Command); len(command.Args) < n || !slices.Equal(command.Args[1:n], c.Command[1:]) {
			continue
		}
		seen++
		if err := c.Accept(command.Args); err != nil && !Unfinished(err) {
			t.Errorf("%v: %v", command, err)
		}
	}
	if t.Logf("%d cases", seen); seen < least {
		t.Errorf("%d commands, want %d or more", seen, least)
	}
}

// Lines checks that a page with one of the lines passes, or fails, as the map says.
func (c Checker) Lines(t *testing.T, lines map[string]bool) {
	t.Helper()
	for line, good := range lines {
		commands, err := Commands("page.md", "text\n\n```console\n$ "+line+"\nout put\n```\n")
		if err != nil || len(commands) == 0 {
			t.Fatalf("%s: %d commands, %v", line, len(commands), err)
		}
		if err := c.Accept(commands[len(commands)-1].Args); (err == nil) != good {
			t.Errorf("%s: %v", line, err)
		}
	}
}
