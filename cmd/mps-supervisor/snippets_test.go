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
func TestSnippets(t *testing.T) { documented.Pages(t, "../..", 1) }

// TestBrokenSnippets: a page with a wrong command fails.
func TestBrokenSnippets(t *testing.T) {
	documented.Lines(t, map[string]bool{
		"mps-supervisor health":                true,
		"mps-supervisor helth":                 false,
		"mps-supervisor --no-such-flag":        false,
		"mps-supervisor --memory-percent=much": false,
	})
}
