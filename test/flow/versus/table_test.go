// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package versus

import (
	"fmt"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/partage-dev/partage/test/expect"
)

// goal is what a row should be: at most a part of NVIDIA's figure, or at most a figure.
type goal struct{ ratio, most float64 }

// row is one line of the table. A side that has no such thing has no figure.
type row struct {
	what, unit string
	goal       goal
	figures    map[string]float64
}

type table struct {
	sides []string
	rows  []row
}

func (t *table) add(what, unit string, g goal, figures map[string]float64) {
	t.rows = append(t.rows, row{what, unit, g, figures})
}

// String has a line for each row, in Markdown.
func (t *table) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 1, ' ', 0)
	head := append(append([]string{"what", "unit"}, t.sides...), "ratio", "goal", "")
	line := func(cells []string) { fmt.Fprintln(w, "| "+strings.Join(cells, "\t| ")+"\t|") }
	line(head)
	line(strings.Split(strings.TrimSuffix(strings.Repeat("---,", len(head)), ","), ","))
	for _, r := range t.rows {
		cells := []string{r.what, r.unit}
		for _, side := range t.sides {
			cells = append(cells, figure(r.figures, side))
		}
		line(append(cells, r.verdict(t.sides)...))
	}
	// It writes into memory.
	_ = w.Flush()
	return b.String()
}

func figure(figures map[string]float64, side string) string {
	value, ok := figures[side]
	switch {
	case !ok:
		return "–"
	case value >= 100:
		return fmt.Sprintf("%.0f", value)
	case value >= 1:
		return fmt.Sprintf("%.1f", value)
	}
	return fmt.Sprintf("%.3f", value)
}

// verdict is the ratio of the first side to the second, the goal, and how far that is.
func (r row) verdict(sides []string) []string {
	ours := r.figures[sides[0]]
	ratio := 0.0
	ratioText, goalText, met := "–", "–", ""
	if len(sides) > 1 && r.figures[sides[1]] > 0 {
		ratio = ours / r.figures[sides[1]]
		ratioText = fmt.Sprintf("%.2f", ratio)
	}
	say := func(ok bool) {
		if met = "missed"; ok {
			met = "met"
		}
	}
	switch {
	case r.goal.most > 0:
		goalText = fmt.Sprintf("≤ %g %s", r.goal.most, r.unit)
		say(ours <= r.goal.most)
	case r.goal.ratio > 0:
		goalText = fmt.Sprintf("≤ %g ×", r.goal.ratio)
		if ratio > 0 {
			say(ratio <= r.goal.ratio)
		}
	}
	return []string{ratioText, goalText, met}
}

// TestTable: a row says whether it meets its goal, and a side without the other has no ratio.
func TestTable(t *testing.T) {
	t.Parallel()
	both := &table{sides: []string{"Partage", "NVIDIA's"}}
	both.add("fast", "ms", goal{ratio: 0.5}, map[string]float64{"Partage": 4, "NVIDIA's": 10})
	both.add("slow", "ms", goal{ratio: 0.5}, map[string]float64{"Partage": 6, "NVIDIA's": 10})
	both.add("large", "MiB", goal{most: 40}, map[string]float64{"Partage": 40.5})
	alone := &table{sides: both.sides[:1], rows: both.rows[:1]}
	for text, lines := range map[string][]string{
		both.String(): {
			"| fast | ms | 4.0 | 10.0 | 0.40 | ≤ 0.5 × | met |",
			"| slow | ms | 6.0 | 10.0 | 0.60 | ≤ 0.5 × | missed |",
			"| large | MiB | 40.5 | – | – | ≤ 40 MiB | missed |",
		},
		alone.String(): {"| fast | ms | 4.0 | – | ≤ 0.5 × | |"},
	} {
		text = strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == ' ' }), " ")
		for _, line := range lines {
			expect.Contains(t, text, line, "the table")
		}
	}
}
