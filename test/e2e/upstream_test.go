//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	shellBlock = regexp.MustCompile("(?s)\n```sh\n(.*?)```\n")
	printed    = regexp.MustCompile("(?s)\n```text\n(.*?)```\n")
	figures    = regexp.MustCompile(`[0-9]+ (s|times|updates)\b`)
)

// TestNeighboursUpstream runs the commands of docs/contributing/upstream, and those that compare the simulator with NVIDIA's, and compares what
// they print with the page, but for seconds and counts: that those are not what they should be is for the commands to see.
func TestNeighboursUpstream(t *testing.T) {
	if suite != neighboursSuite {
		t.Skip("needs the programs of suite " + neighboursSuite)
	}
	pages, err := filepath.Glob(filepath.Join(repoRoot, "docs/contributing/upstream/*.md"))
	if err != nil {
		t.Fatal(err)
	}
	pages = append(pages, filepath.Join(repoRoot, "docs/design/second-opinion.md"))
	ran := 0
	for _, path := range pages {
		page, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !shellBlock.Match(page) {
			continue
		}
		ran++
		name := strings.TrimSuffix(filepath.Base(path), ".md")
		t.Run(name, func(t *testing.T) {
			waitDriverBack(t) // where the commands before took it away
			wantPrinted(t, page, 0)
			switch name {
			case "dcgm-exporter":
				record(t, name, "its package finds the GPUs of all whole GPUs and partitions in the slices, of shares with a patch")
			case "second-opinion":
				record(t, "NVIDIA fake NVML", "the plugin publishes eight whole GPUs and their shares")
			}
		})
	}
	if ran != 6 {
		t.Errorf("%d pages have commands, want 6", ran)
	}
}

// wantPrinted runs the commands of a page, and compares what they print with one of its outputs.
func wantPrinted(t *testing.T, page []byte, output int) {
	t.Helper()
	outputs := printed.FindAllSubmatch(page, -1)
	if len(outputs) <= output {
		t.Fatalf("the page has %d outputs", len(outputs))
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", string(shellBlock.FindSubmatch(page)[1]))
	cmd.Dir = repoRoot
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	t.Logf("the commands print:\n%s", out)
	got := printedLines(string(out))
	if want := printedLines(string(outputs[output][1])); err != nil || got != want {
		t.Errorf("got, %v:\n%s\nwant:\n%s\nstandard error:\n%s", err, got, want, stderr.String())
	}
}

// kubectlSays is what kubectl prints of what it changed.
var kubectlSays = regexp.MustCompile(`(?m)^(pod|resourceclaim|resourceslice|deviceclass)[a-z0-9./"-]* .*(created|patched|met|deleted).*\n`)

// printedLines is what a page shows of an output: without what kubectl says of its changes, and with N for figures.
func printedLines(text string) string {
	return figures.ReplaceAllString(kubectlSays.ReplaceAllString(text, ""), "N $1")
}
