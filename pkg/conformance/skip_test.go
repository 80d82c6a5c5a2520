// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/node/host"
)

// TestSkip: a check that is to be skipped asks nothing, its report says so, and so does the
// one that is made from the transcript.
func TestSkip(t *testing.T) {
	var recorded bytes.Buffer
	roots := host.Roots{}.Complete()
	roots.Driver, roots.Proc, roots.Sys = t.TempDir(), t.TempDir(), t.TempDir()
	n := NewNode(Options{Roots: roots, Parts: []Part{ReadOnly}, Skip: []string{"node.kernel", "driver.nvml"}, Transcript: &recorded})
	live := Run(t.Context(), n)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(recorded.String(), "kernel release") {
		t.Error("node.kernel was asked about")
	}
	replayed, err := Replay(&recorded)
	if err != nil {
		t.Fatal(err)
	}
	for name, report := range map[string]*Report{"live": live, "replayed": Run(t.Context(), replayed)} {
		var skipped []string
		for _, r := range report.Results {
			if r.Verdict == Skipped {
				skipped = append(skipped, r.Check)
			}
		}
		if want := []string{"node.kernel", "driver.nvml"}; !slices.Equal(skipped, want) || report.Summary.Skipped != len(want) {
			t.Errorf("%s: skipped %v (%d), want %v", name, skipped, report.Summary.Skipped, want)
		}
		var table bytes.Buffer
		if err := report.WriteTable(&table); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"skipped       node.kernel", "not testable, 2 skipped\n"} {
			if !strings.Contains(table.String(), want) {
				t.Errorf("%s: the table lacks %q:\n%s", name, want, table.String())
			}
		}
	}
}

// TestSkipIsNoAnswer: a part of which all checks were skipped has not been tested.
func TestSkipIsNoAnswer(t *testing.T) {
	in, err := os.Open("testdata/simulated.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	n, err := Replay(in)
	if err != nil {
		t.Fatal(err)
	}
	for _, check := range Checks(ReadOnly) {
		n.header.Skip = append(n.header.Skip, check.ID)
	}
	report := Run(t.Context(), n)
	if report.ExitCode() != ExitCouldNotRun || report.Summary.Skipped != len(Checks(ReadOnly)) {
		t.Errorf("exit code %d, %+v", report.ExitCode(), report.Summary)
	}
}
