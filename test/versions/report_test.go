// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package versions

import (
	"flag"
	"testing"

	"github.com/partage-dev/partage/test/docs/page"
)

var update = flag.Bool("update", false, "write the table")

// The table in the documentation is what the runs saw.
func TestTableOfReports(t *testing.T) {
	reports, err := Load("testdata")
	if err != nil || len(reports) < 6 {
		t.Fatalf("%d reports, want at least 6 (%v)", len(reports), err)
	}
	page.Generated(t, *update, "docs/reference/compatibility.md", Markdown(reports))
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
