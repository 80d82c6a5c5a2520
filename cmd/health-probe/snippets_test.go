// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"testing"

	"github.com/partage-dev/partage/pkg/node/healthsocket"
	"github.com/partage-dev/partage/test/docs/snippet"
)

// documented accepts what a process that is well would have asked.
func documented(t *testing.T) snippet.Checker {
	t.Helper()
	well := func(context.Context) error { return nil }
	socket := serve(t, healthsocket.Checks{Liveness: well, Readiness: well})
	return snippet.Checker{
		Command: []string{name},
		Accept:  func(args []string) error { return probe(args[1:], socket) },
	}
}

// TestSnippets: commands in the documentation are those of this program.
func TestSnippets(t *testing.T) { documented(t).Pages(t, "../..", 2) }

// TestBrokenSnippets: a page with a wrong command fails.
func TestBrokenSnippets(t *testing.T) {
	documented(t).Lines(t, map[string]bool{
		"kubectl exec POD -- health-probe readiness": true,
		"health-probe":                    false,
		"health-probe startup":            false,
		"health-probe --verbose liveness": false,
	})
}
