// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package hardware replays what real GPUs answered.
package hardware

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/conformance"
)

var update = flag.Bool("update", false, "write the golden reports")

// report replays a transcript.
func report(t *testing.T, path string) (*conformance.Report, string) {
	t.Helper()
	in, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	node, err := conformance.Replay(in)
	if err != nil {
		t.Fatal(err)
	}
	r := conformance.Run(t.Context(), node)
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	return r, table.String()
}

// TestTranscripts: checks that have changed ask a real machine nothing that its transcript does
// not answer, or say so, and find the same. docs/how-to/conformance.md says how transcripts
// are made.
func TestTranscripts(t *testing.T) {
	transcripts, err := filepath.Glob("transcripts/*.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	if len(transcripts) == 0 {
		t.Skip("no transcript yet: nobody has run test/hardware/run on a real GPU")
	}
	for _, path := range transcripts {
		t.Run(filepath.Base(path), func(t *testing.T) {
			_, got := report(t, path)
			golden := strings.TrimSuffix(path, ".jsonl") + ".golden.txt"
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", golden, diff)
			}
		})
	}
}

// TestReplay: the way in which transcripts are read, with one of a simulated machine.
func TestReplay(t *testing.T) {
	r, table := report(t, "../../pkg/conformance/testdata/simulated.jsonl")
	if r.Summary.Holds == 0 || !strings.Contains(table, "holds         driver.nvml") {
		t.Errorf("got %+v:\n%s", r.Summary, table)
	}
}
