// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"testing"

	"github.com/partage-dev/partage/test/docs/snippet"
)

// TestSnippets: commands in the documentation, with their flags, are those of this program.
func TestSnippets(t *testing.T) {
	commands, err := snippet.All("../..", name)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range commands {
		if err := snippet.Accept(newCommand(io.Discard, io.Discard), c.Args); err != nil && !snippet.Unfinished(err) {
			t.Errorf("%v: %v", c, err)
		}
	}
	if t.Logf("%d cases", len(commands)); len(commands) < 10 {
		t.Errorf("only %d commands", len(commands))
	}
}

// TestBrokenSnippets: a page with a wrong command fails.
func TestBrokenSnippets(t *testing.T) {
	for text, want := range map[string]bool{
		"kubectl exec POD -- gpu-kubelet-plugin slices --policy-file /dev/stdin": true,
		"gpu-kubelet-plugin slice":                     false,
		"gpu-kubelet-plugin conformance --intrusively": false,
		"gpu-kubelet-plugin --kube-api-burst=many":     false,
	} {
		commands, err := snippet.Commands("page.md", "```console\n$ "+text+"\nout put\n```\n")
		if err != nil || len(commands) == 0 {
			t.Fatalf("%s: %d commands, %v", text, len(commands), err)
		}
		err = snippet.Accept(newCommand(io.Discard, io.Discard), commands[len(commands)-1].Args)
		if (err == nil) != want {
			t.Errorf("%s: %v", text, err)
		}
	}
}
