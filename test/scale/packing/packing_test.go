// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package packing

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/kubectl/boards"
)

func load(t *testing.T, model string) *Board {
	t.Helper()
	b, err := LoadBoard(model)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// partition finds a partition by the end of its name.
func (b *Board) partition(t *testing.T, name string) int {
	t.Helper()
	i := slices.IndexFunc(b.names, func(full string) bool { return strings.HasSuffix(full, "-mig-"+name) })
	if i < 0 {
		t.Fatalf("no partition %s among %v", name, b.names)
	}
	return i
}

func (b *Board) holding(t *testing.T, names ...string) Held {
	t.Helper()
	var held Held
	for _, name := range names {
		held = held.with(b.partition(t, name))
	}
	return held
}

func TestBoard(t *testing.T) {
	b := load(t, "h100-80-sxm")
	if want := []string{"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"}; !slices.Equal(b.Profiles, want) {
		t.Errorf("profiles %v, want %v", b.Profiles, want)
	}
	if want := []int{1, 2, 2, 4, 4, 8}; !slices.Equal(b.size, want) || b.memorySlices != 8 {
		t.Errorf("memory slices %v of %d, want %v of 8", b.size, b.memorySlices, want)
	}
	for _, c := range []struct {
		held []string
		used int
		room int
	}{
		{nil, 0, 7 + 8 + 6 + 8 + 4 + 8},
		{[]string{"1g10gb-6"}, 1, 6 + 6 + 6 + 4 + 4},
		{[]string{"1g10gb-0"}, 1, 6 + 6 + 4 + 4},
		{[]string{"3g40gb-4"}, 4, 4 + 4 + 4 + 4 + 4},
		{[]string{"3g40gb-4", "4g40gb-0"}, 8, 0},
		{[]string{"7g80gb-0"}, 8, 0},
	} {
		if s := b.at(b.holding(t, c.held...)); s.used != c.used || s.room != c.room {
			t.Errorf("with %v: %d memory slices used and room %d, want %d and %d", c.held, s.used, s.room, c.used, c.room)
		}
	}
	if _, err := LoadBoard("l4"); err == nil {
		t.Error("a model without partitions was loaded")
	}
}

func TestRules(t *testing.T) {
	b := load(t, "h100-80-sxm")
	for _, c := range []struct {
		rule    Rule
		gpus    []Held
		profile string
		want    string
	}{
		{Published, []Held{0, 0}, "1g.10gb", "0: 1g10gb-6"},
		{Alphabetical, []Held{0, 0}, "1g.10gb", "0: 1g10gb-0"},
		{Published, []Held{0, b.holding(t, "1g10gb-6")}, "1g.10gb", "0: 1g10gb-6"},
		{Fullest, []Held{0, b.holding(t, "1g10gb-6")}, "1g.10gb", "1: 1g10gb-4"},
		{BestFit, []Held{0, b.holding(t, "1g10gb-6")}, "1g.10gb", "1: 1g10gb-4"},
		// The fullest has no place.
		{Fullest, []Held{0, b.holding(t, "4g40gb-0")}, "4g.40gb", "0: 4g40gb-0"},
		// The rest of a 3g, where no 4g can be, costs less than any other place.
		{Fullest, []Held{b.holding(t, "1g10gb-6", "2g20gb-4"), b.holding(t, "1g10gb-0", "1g10gb-1", "1g10gb-2", "1g10gb-3")}, "1g.10gb", "1: 1g10gb-6"},
		{BestFit, []Held{b.holding(t, "4g40gb-0"), b.holding(t, "3g40gb-4", "2g20gb-0")}, "2g.20gb", "1: 2g20gb-2"},
		{Published, []Held{b.holding(t, "7g80gb-0"), b.holding(t, "1g10gb-0")}, "7g.80gb", ""},
		{BestFit, []Held{b.holding(t, "7g80gb-0"), b.holding(t, "1g10gb-0")}, "7g.80gb", ""},
	} {
		got := ""
		if g, p, ok := NewChooser(b, c.rule).Choose(c.gpus, slices.Index(b.Profiles, c.profile)); ok {
			_, name, _ := strings.Cut(b.names[p], "-mig-")
			got = fmt.Sprintf("%d: %s", g, name)
		}
		if got != c.want {
			t.Errorf("%s: %s in %b: got %q, want %q", c.rule.Name, c.profile, c.gpus, got, c.want)
		}
	}
}

// TestBestFitTriesAll holds the rule against all places of all GPUs.
func TestBestFitTriesAll(t *testing.T) {
	b, cases := load(t, "h100-80-sxm"), 0
	chooser := NewChooser(b, BestFit)
	visit(b, 200, func(gpus []Held) {
		for profile := range b.Profiles {
			best := math.MaxInt
			for _, held := range gpus {
				for p := range b.names {
					if b.profile[p] == profile && b.at(held).fits.has(p) {
						best = min(best, b.at(held).room-b.at(held.with(p)).room)
					}
				}
			}
			g, p, ok := chooser.Choose(gpus, profile)
			if ok != (best < math.MaxInt) {
				t.Fatalf("%s in %b: chosen %t", b.Profiles[profile], gpus, ok)
			}
			if ok && b.at(gpus[g]).room-b.at(gpus[g].with(p)).room != best {
				t.Fatalf("%s in %b: %s of GPU %d costs more room than %d", b.Profiles[profile], gpus, b.names[p], g, best)
			}
			cases++
		}
	})
	if cases != 1200 {
		t.Errorf("%d cases, want 1200", cases)
	}
}

// visit fills GPUs at random, in so many ways.
func visit(b *Board, times int, f func(gpus []Held)) {
	random := rand.New(rand.NewPCG(1, 2))
	for range times {
		gpus := make([]Held, 3)
		for range random.IntN(16) {
			g, p := random.IntN(len(gpus)), random.IntN(len(b.names))
			if b.at(gpus[g]).fits.has(p) {
				gpus[g] = gpus[g].with(p)
			}
		}
		f(gpus)
	}
}

// TestOrderOfNVIDIA says why one column stands for both: the names of NVIDIA's driver
// (MigSpecTuple.ToCanonicalName) sort the partitions of one profile as the names of this one.
func TestOrderOfNVIDIA(t *testing.T) {
	cases := 0
	for _, model := range Default.Models {
		b := load(t, model)
		facts, err := boards.Load(model)
		if err != nil {
			t.Fatal(err)
		}
		theirs := map[string][]string{} // by profile, in the order of their names
		for _, p := range facts.GPUs[0].MIG.Profiles {
			type named struct{ their, our string }
			var all []named
			for _, place := range p.Placements {
				short := strings.ReplaceAll(p.Name, ".", "")
				all = append(all, named{fmt.Sprintf("gpu-0-mig-%s-%d-%d", short, p.ID, place.Start), fmt.Sprintf("%s-%d", short, place.Start)})
			}
			slices.SortFunc(all, func(x, y named) int { return cmp.Compare(x.their, y.their) })
			for _, n := range all {
				theirs[p.Name] = append(theirs[p.Name], n.our)
			}
		}
		for profile, places := range NewChooser(b, Alphabetical).places {
			var ours []string
			for _, p := range places {
				_, name, _ := strings.Cut(b.names[p], "-mig-")
				ours = append(ours, name)
			}
			if !slices.Equal(ours, theirs[b.Profiles[profile]]) {
				t.Errorf("%s: %v, and NVIDIA's driver %v", model, ours, theirs[b.Profiles[profile]])
			}
			cases++
		}
	}
	if cases != 12 {
		t.Errorf("%d cases, want 12", cases)
	}
}

// TestErlang holds the simulation against a formula: claims for whole GPUs only are refused as
// calls are by so many lines.
func TestErlang(t *testing.T) {
	b := load(t, "h100-80-sxm")
	for _, offered := range []float64{0.5, 0.9} {
		c := Churn{Seed: 7, Nodes: 1, GPUs: 8, Mix: Mix{"7g", []Share{{"7g", 1}}}, Load: offered, Warmup: 1000, Claims: 100_000}
		outcome, err := c.Run(b, Published)
		if err != nil {
			t.Fatal(err)
		}
		refused := 1.0
		for n := 1.0; n <= 8; n++ {
			refused = 8 * offered * refused / (n + 8*offered*refused)
		}
		if got := 1 - outcome.Acceptance("7g"); math.Abs(got-refused) > 0.01 || outcome.Asked["7g"] != 100_000 {
			t.Errorf("load %.1f: %.3f of %d are refused, want %.3f", offered, got, outcome.Asked["7g"], refused)
		}
	}
}

func TestChurn(t *testing.T) {
	h100, a100 := load(t, "h100-80-sxm"), load(t, "a100-80")
	c := Churn{Seed: 3, Nodes: 2, GPUs: 4, Mix: Mixes[0], Load: 0.8, Warmup: 100, Claims: 3000}
	run := func(c Churn, b *Board, r Rule) Outcome {
		t.Helper()
		outcome, err := c.Run(b, r)
		if err != nil {
			t.Fatal(err)
		}
		return outcome
	}
	ours := run(c, h100, Published)
	if again := run(c, load(t, "h100-80-sxm"), Published); !reflect.DeepEqual(ours, again) {
		t.Errorf("twice the same gives %v and %v", ours, again)
	}
	if other := run(c, a100, Published); !reflect.DeepEqual(ours, other) {
		t.Errorf("the A100, which has the same partitions, gives %v, the H100 %v", other, ours)
	}
	for _, r := range Rules {
		outcome := run(c, h100, r)
		if !reflect.DeepEqual(outcome.Asked, ours.Asked) {
			t.Errorf("%s: other claims arrive: %v, not %v", r.Name, outcome.Asked, ours.Asked)
		}
		for profile, asked := range outcome.Asked {
			if accepted := outcome.Accepted[profile]; accepted < 1 || accepted > asked {
				t.Errorf("%s: %d of %d %s are accepted", r.Name, accepted, asked, profile)
			}
		}
	}
	c.Load = 0.01
	if outcome := run(c, h100, Published); outcome.Acceptance(Large...) != 1 {
		t.Errorf("with nearly no load: %v", outcome)
	}
	c.Order, c.Load = Pack, 0.8
	if reflect.DeepEqual(run(c, h100, Published), ours) {
		t.Error("it makes no difference which node is taken")
	}
	c.Mix = Mix{"unknown", []Share{{"5g", 1}}}
	if _, err := c.Run(h100, Published); err == nil {
		t.Error("a mix with a profile that there is not was simulated")
	}
}

func TestStudy(t *testing.T) {
	var out bytes.Buffer
	s := Study{Models: []string{"h100-80-sxm"}, Loads: []float64{0.5, 0.9}, Seeds: 2, Warmup: 50, Claims: 300}
	if err := s.Write(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"1 node with 8 h100-80-sxm, requests: even", "4 nodes with", "best fit", "node with the most claims"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the tables lack %q:\n%s", want, out.String())
		}
	}
	if rows := strings.Count(out.String(), "\n0."); rows != 8 {
		t.Errorf("%d rows, want 8:\n%s", rows, out.String())
	}
	if err := (Study{Models: []string{"l4"}}).Write(&out); err == nil {
		t.Error("a model without partitions was studied")
	}
}
