// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"strings"
)

// Markdown is the part of docs/reference/metrics.md that lists all metrics.
func Markdown() string {
	var b strings.Builder
	for _, g := range Reference() {
		fmt.Fprintf(&b, "### %s\n\n", g.Title)
		if g.Text != "" {
			fmt.Fprintf(&b, "%s\n\n", g.Text)
		}
		b.WriteString("| Name | Type | Unit | Labels | Meaning |\n|---|---|---|---|---|\n")
		for _, d := range g.Definitions {
			labels := "–"
			if len(d.Labels) > 0 {
				labels = "`" + strings.Join(d.Labels, "`, `") + "`"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", d.Name, d.Type, d.unit(), labels, d.Help)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// unit follows from the name, by Prometheus's conventions.
func (d Definition) unit() string {
	name := strings.TrimSuffix(d.Name, "_total")
	for _, unit := range []string{"bytes", "seconds", "ratio", "celsius"} {
		if strings.HasSuffix(name, "_"+unit) {
			return unit
		}
	}
	return "–"
}
