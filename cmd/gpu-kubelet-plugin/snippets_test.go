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
func TestSnippets(t *testing.T) { documented.Pages(t, "../..", 10) }

// TestBrokenSnippets: a page with a wrong command fails.
func TestBrokenSnippets(t *testing.T) {
	documented.Lines(t, map[string]bool{
		"kubectl exec POD -- gpu-kubelet-plugin slices --policy-file /dev/stdin": true,
		"gpu-kubelet-plugin slice":                     false,
		"gpu-kubelet-plugin conformance --intrusively": false,
		"gpu-kubelet-plugin --kube-api-burst=many":     false,
	})
}
