// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package grafana

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestExpand: a panel is repeated beside and below itself, and those that follow move down.
func TestExpand(t *testing.T) {
	d := Dashboard{Panels: []Panel{
		{Title: "GPU $gpu of ${node}", Repeat: "gpu", MaxPerRow: 2, GridPos: GridPos{W: 12, H: 3, Y: 1}, Targets: []Target{{Expr: `m{node="$node", gpu=~"$gpu"}`}}},
		{Title: "all", GridPos: GridPos{Y: 4, W: 24, H: 5}, Targets: []Target{{Expr: `rate(m{gpu=~"$gpu"}[$__rate_interval]) $1`}}},
	}}
	got := d.Expand(Values{"node": {"n"}, "gpu": {"a.0", "b", "c"}})
	target := func(expr string) []Target { return []Target{{Expr: expr}} }
	first := Panel{Repeat: "gpu", MaxPerRow: 2}
	want := []Panel{first, first, first, {
		Title: "all", GridPos: GridPos{Y: 7, W: 24, H: 5}, Targets: target(`rate(m{gpu=~"(a\\.0|b|c)"}[4m]) $1`),
	}}
	want[0].Title, want[0].GridPos, want[0].Targets = "GPU a.0 of n", GridPos{Y: 1, W: 12, H: 3}, target(`m{node="n", gpu=~"a.0"}`)
	want[1].Title, want[1].GridPos, want[1].Targets = "GPU b of n", GridPos{X: 12, Y: 1, W: 12, H: 3}, target(`m{node="n", gpu=~"b"}`)
	want[2].Title, want[2].GridPos, want[2].Targets = "GPU c of n", GridPos{Y: 4, W: 12, H: 3}, target(`m{node="n", gpu=~"c"}`)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
