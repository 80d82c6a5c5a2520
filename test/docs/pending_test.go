// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// unknownWords returns the pieces of what a page quotes, between ellipses, that a text does not have.
func unknownWords(quote, text string) []string {
	var unknown []string
	for piece := range strings.SplitSeq(quote, "…") {
		if piece = strings.TrimSpace(piece); piece != "" && !strings.Contains(text, piece) {
			unknown = append(unknown, piece)
		}
	}
	return unknown
}

// TestPendingReasons: each of the reasons why a pod waits is quoted as kubectl gpu explain says it.
func TestPendingReasons(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/how-to/pending.md"))
	if err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob(filepath.Join(root, "pkg/kubectl/explain/testdata/pending/*.txt"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%d golden files, %v", len(paths), err)
	}
	var said strings.Builder
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		said.WriteString(strings.Join(strings.Fields(string(content)), " ") + "\n") // lines are broken between words
	}
	reasons := 0
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(line, "|")
		if len(cells) < 5 || strings.Trim(strings.TrimSpace(cells[1]), "0123456789") != "" || strings.TrimSpace(cells[1]) == "" {
			continue
		}
		quote := span(cells[2])
		if reasons++; quote == "" {
			t.Errorf("reason%squotes nothing", cells[1])
		}
		for _, piece := range unknownWords(quote, said.String()) {
			t.Errorf("reason%s: kubectl gpu explain never says %q", cells[1], piece)
		}
	}
	if t.Logf("%d cases", reasons); reasons != 10 {
		t.Errorf("%d reasons, want ten", reasons)
	}
}

// span is the first code in a text.
func span(text string) string {
	_, rest, _ := strings.Cut(text, "`")
	code, _, _ := strings.Cut(rest, "`")
	return code
}

func TestBrokenPendingReasons(t *testing.T) {
	for quote, want := range map[string]int{"… of … b": 0, "a of": 0, "… not there": 1, "x … y": 2} {
		if unknown := unknownWords(quote, "a of b"); len(unknown) != want {
			t.Errorf("%q: %q", quote, unknown)
		}
	}
}
