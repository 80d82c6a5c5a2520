// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/docs/page"
)

// TestDocs writes all metrics into their page, or compares it.
func TestDocs(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	for _, g := range Reference() {
		fmt.Fprintf(&text, "### %s\n\n", g.Title)
		if g.Text != "" {
			fmt.Fprintf(&text, "%s\n\n", g.Text)
		}
		table := page.NewTable("Name", "Type", "Unit", "Labels", "Meaning")
		for _, d := range g.Definitions {
			labels := "–"
			if len(d.Labels) > 0 {
				labels = page.Codes(d.Labels)
			}
			table.Row(page.Code(d.Name), string(d.Type), unit(d.Name), labels, d.Help)
		}
		fmt.Fprintf(&text, "%s\n", table)
	}
	page.Generated(t, *update, "docs/reference/metrics.md", text.String())
}

// unit follows from the name, by Prometheus's conventions.
func unit(name string) string {
	name = strings.TrimSuffix(name, "_total")
	for _, unit := range []string{"bytes_per_second", "bytes", "seconds", "ratio", "celsius", "watts"} {
		if strings.HasSuffix(name, "_"+unit) {
			return strings.ReplaceAll(unit, "_", " ")
		}
	}
	return "–"
}
