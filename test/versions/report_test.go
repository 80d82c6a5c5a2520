// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package versions

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the table")

// Around what is written into the page.
const (
	begin = "<!-- begin: written by make test-versions -->\n"
	end   = "<!-- end -->\n"
)

// The table in the documentation is what the runs saw.
func TestTableOfReports(t *testing.T) {
	reports, err := Load("testdata")
	if err != nil || len(reports) < 6 {
		t.Fatalf("%d reports, want at least 6 (%v)", len(reports), err)
	}
	page := filepath.Join("..", "..", "docs", "reference", "compatibility.md")
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(content), begin)
	table, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s lacks %q or %q after it", page, begin, end)
	}
	want := "\n" + Markdown(reports) + "\n"
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+want+end+after), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, table); diff != "" {
		t.Errorf("the table of %s is not of the reports; make test-versions or make golden writes it (-want +got):\n%s", page, diff)
	}
}

// A cluster that gave a device twice is not one to recommend; such a report is of a run that failed.
func TestReports(t *testing.T) {
	reports, err := Load("testdata")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range reports {
		if r.Full.GivenTwice != 0 || r.Full.Refused != 0 || r.Full.Asked < 20 {
			t.Errorf("Kubernetes %s%s: %+v", r.Kubernetes, with(r.FeatureGates), r.Full)
		}
	}
}
