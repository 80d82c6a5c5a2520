// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"testing"

	"github.com/partage-dev/partage/test/docs/snippet"
)

var documented = snippet.Checker{
	Command: []string{name},
	Accept:  func(args []string) error { return snippet.Accept(newCommand(io.Discard, io.Discard), args) },
}

// TestSnippets: commands in the documentation, with their flags, are those of this program.
// No page has one now; TestBrokenSnippets shows that they would be found.
func TestSnippets(t *testing.T) { documented.Pages(t, "../..", 0) }

// TestBrokenSnippets: a page with a wrong command fails.
func TestBrokenSnippets(t *testing.T) {
	documented.Lines(t, map[string]bool{
		"mps-supervisor --memory-percent=30":   true,
		"mps-supervisor health":                false,
		"mps-supervisor --no-such-flag":        false,
		"mps-supervisor --memory-percent=much": false,
	})
}
