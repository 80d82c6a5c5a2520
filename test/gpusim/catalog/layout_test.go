// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func gpuOf(t *testing.T, board string) *machine.GPU {
	t.Helper()
	b := must.Get(Load(board))(t)
	return must.Get(b.GPU())(t)
}

func TestLegal(t *testing.T) {
	in := func(id uint32, start, size int) Instance {
		return Instance{ProfileID: id, Placement: machine.Placement{Start: start, Size: size}}
	}
	for name, c := range map[string]struct {
		board  string
		layout Layout
		want   string // part of the error; empty: legal
	}{
		"nothing":                        {"h200", nil, ""},
		"seven small":                    {"h100-80-sxm", Layout{in(19, 0, 1), in(19, 1, 1), in(19, 2, 1), in(19, 3, 1), in(19, 4, 1), in(19, 5, 1), in(19, 6, 1)}, ""},
		"four and three":                 {"a100-40", Layout{in(5, 0, 4), in(9, 4, 4)}, ""},
		"two of three, mixed":            {"a100-80", Layout{in(14, 0, 2), in(14, 2, 2), in(14, 4, 2), in(20, 6, 1)}, ""},
		"overlap":                        {"h100-80-sxm", Layout{in(9, 0, 4), in(19, 3, 1)}, "slice 3 is taken"},
		"whole and small":                {"h100-80-sxm", Layout{in(0, 0, 8), in(19, 3, 1)}, "is taken"},
		"last slice is disabled":         {"h100-80-sxm", Layout{in(19, 7, 1)}, "cannot be at 7:1"},
		"four at the end":                {"h100-80-sxm", Layout{in(5, 4, 4)}, "cannot be at 4:4"},
		"two with extensions":            {"h100-80-sxm", Layout{in(20, 0, 1), in(20, 1, 1)}, "at most 1 instances"},
		"two kinds with extensions":      {"a30", Layout{in(21, 0, 1), in(6, 2, 2)}, "media extensions"},
		"extension beside plain":         {"a30", Layout{in(6, 0, 2), in(5, 2, 2)}, ""},
		"unknown profile":                {"a30", Layout{in(19, 0, 1)}, "does not exist"},
		"no MIG":                         {"l4", Layout{in(19, 0, 1)}, "cannot be partitioned"},
		"all engines beside none":        {"rtx-pro-6000", Layout{in(64, 0, 6), in(67, 6, 3), in(67, 9, 3)}, ""},
		"all engines beside some":        {"rtx-pro-6000", Layout{in(65, 0, 3), in(14, 3, 3)}, "all media engines"},
		"all engines beside an extended": {"rtx-pro-6000", Layout{in(65, 0, 3), in(21, 3, 3)}, "media extensions"},
		"graphics beside compute":        {"rtx-pro-6000", Layout{in(47, 0, 3), in(14, 3, 3), in(66, 6, 6)}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := Legal(gpuOf(t, c.board), c.layout)
			if c.want == "" && err != nil {
				t.Errorf("must be legal: %v", err)
			}
			if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got error %v, want one with %q", err, c.want)
			}
		})
	}
}

// The counts without the +me profiles are computed by hand for an H100: a half
// has 6 x 6 fillings by pairs, plus 3g and 4g; the other half 6 x 3, plus 3g.
func TestLayouts(t *testing.T) {
	g := gpuOf(t, "h100-80-sxm")
	plain := 0
	for _, l := range Layouts(g) {
		extended := false
		for _, in := range l {
			extended = extended || in.ProfileID == 20
		}
		if !extended {
			plain++
		}
	}
	expect.Equal(t, plain, (6*6+2)*(6*3+1)+1, "layouts without media extensions")
	// NVIDIA's table has 19 combinations for these boards when order, +me and
	// double-memory profiles do not count.
	seen := map[string]bool{}
	for _, l := range MaximalLayouts(g) {
		var names []string
		ok := true
		for _, in := range l {
			ok = ok && in.ProfileID != 20 && in.ProfileID != 15
			names = append(names, profile(g, in.ProfileID).Name)
		}
		if ok {
			seen[strings.Join(names, " ")] = true
		}
	}
	if len(seen) < 18 {
		t.Errorf("%d maximal layouts by profile, want the 18 of NVIDIA's table and more: %v", len(seen), seen)
	}
	if got := Layouts(gpuOf(t, "t4")); got != nil {
		t.Errorf("a board without MIG has layouts: %v", got)
	}
}

// Order must be the same at every call, since tests name cases after it.
func TestLayoutsAreDistinct(t *testing.T) {
	for _, name := range []string{"a30", "rtx-pro-6000", "a100-40"} {
		g := gpuOf(t, name)
		seen := map[string]bool{}
		for _, l := range Layouts(g) {
			s := show(g, l)
			if seen[s] {
				t.Errorf("%s: %s occurs twice", name, s)
			}
			seen[s] = true
		}
	}
}
