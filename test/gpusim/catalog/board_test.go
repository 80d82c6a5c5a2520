// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func TestWantedBoardsExist(t *testing.T) {
	for _, name := range []string{
		"t4", "l4", "a10", "a30", "a100-40", "a100-80", "h100-80-sxm", "h100-nvl", "h200",
		"gh200-144", "gh200-96", "b200", "gb200", "rtx-pro-6000", "l40s", "a2", "a16", "v100-16",
	} {
		if !slices.Contains(Boards(), name) {
			t.Errorf("no board %s", name)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	for name, c := range map[string]struct{ data, want string }{
		"unknown key":   {"name: x\nproduct: {color: green}\n", "color"},
		"repeated key":  {"name: x\nname: x\n", "name"},
		"other name":    {"name: z\n", `says "z"`},
		"not a mapping": {"- x\n", "x"},
	} {
		expect.Says(t, expect.Err(decode("x", []byte(c.data))), c.want, name)
	}
	expect.Says(t, expect.Err(Load("voodoo")), "h200", "the error of an unknown board must list the known ones")
}

// forBoards runs a test for each board.
func forBoards(t *testing.T, f func(t *testing.T, b *Board, g *machine.GPU)) {
	for _, name := range Boards() {
		t.Run(name, func(t *testing.T) {
			b := must.Get(Load(name))(t)
			g := must.Get(b.GPU())(t)
			f(t, b, g)
		})
	}
}

// Every value is tagged, and no tag names a value that is not there.
func TestSources(t *testing.T) {
	forBoards(t, func(t *testing.T, b *Board, _ *machine.GPU) {
		check := func(what string, tags Tags, section any) {
			for key, s := range tags.Except {
				if !slices.Contains(keys(section), key) {
					t.Errorf("%s: except names %q, which is no value of it", what, key)
				}
				if s == tags.Source {
					t.Errorf("%s: %s is an exception with the section's own source", what, key)
				}
			}
			for _, key := range keys(section) {
				if s := tags.Of(key); s != Measured && s != Documented && s != Assumed {
					t.Errorf("%s.%s: source %q", what, key, s)
				}
			}
		}
		check("product", b.Product.Tags, b.Product)
		check("mps", b.MPS.Tags, b.MPS)
		if b.MIG == nil {
			return
		}
		check("mig", b.MIG.Tags, *b.MIG)
		for _, p := range b.MIG.Profiles {
			check(p.Name, p.Tags, p)
			check(p.Name+".compute", p.Compute.Tags, p.Compute)
		}
	})
}

// keys is the YAML keys of a section's own values.
func keys(section any) []string {
	var out []string
	typ := reflect.TypeOf(section)
	for i := range typ.NumField() {
		if f := typ.Field(i); !f.Anonymous {
			out = append(out, f.Tag.Get("json"))
		}
	}
	return out
}

func TestProductIsComplete(t *testing.T) {
	forBoards(t, func(t *testing.T, b *Board, g *machine.GPU) {
		if g.ProductName == "" || g.PCIDeviceID&0xffff != 0x10de || g.PCISubsystem == 0 {
			t.Errorf("product name or PCI ids are missing: %+v", b.Product)
		}
		if g.MemoryBytes == 0 || g.ReservedBytes == 0 || g.ReservedBytes >= g.MemoryBytes || g.Cores == 0 {
			t.Errorf("memory or cores are missing: %+v", b.Product)
		}
		if g.ContextBytes == 0 || g.MPSServerBytes == 0 || g.MIG != nil && g.MIG.ContextBytes == 0 {
			t.Errorf("what programs take is missing: %+v", b.MPS)
		}
		if (g.MIG != nil) && g.MIG.ResetToSwitch != (g.Architecture == architectures["ampere"]) {
			t.Error("a mode change needs a reset exactly on Ampere")
		}
	})
}

func TestProfiles(t *testing.T) {
	forBoards(t, func(t *testing.T, b *Board, g *machine.GPU) {
		if g.MIG == nil {
			return
		}
		seen := map[any]bool{} // enumeration values are int, ids uint32, names string
		whole := false
		for _, p := range g.MIG.Profiles {
			for _, key := range []any{p.Enum, p.ID, p.Name} {
				if seen[key] {
					t.Errorf("%s: %v occurs twice", p.Name, key)
				}
				seen[key] = true
			}
			whole = whole || p.Placements[0].Size == g.MIG.MemorySlices
			checkPlacements(t, g, p)
			if p.MemoryMiB*miB > g.MemoryBytes || p.MemoryMiB == 0 {
				t.Errorf("%s: %d MiB is none or more than the board has", p.Name, p.MemoryMiB)
			}
			if p.ReservedMiB == 0 || p.ReservedMiB > p.MemoryMiB/20 {
				t.Errorf("%s: %d MiB of %d are reserved", p.Name, p.ReservedMiB, p.MemoryMiB)
			}
			if p.SMs > b.Product.SMs {
				t.Errorf("%s: %d SMs is more than the board has", p.Name, p.SMs)
			}
		}
		if !whole {
			t.Error("no profile has all of the memory slices")
		}
	})
}

func checkPlacements(t *testing.T, g *machine.GPU, p machine.GIProfile) {
	t.Helper()
	end := 0
	for _, at := range p.Placements {
		if at.Start < end || at.Start%at.Size != 0 {
			t.Errorf("%s: placement %v is unaligned, overlaps or is out of order", p.Name, at)
		}
		end = at.Start + at.Size
	}
	if end > g.MIG.MemorySlices {
		t.Errorf("%s: there is no slice %d", p.Name, end-1)
	}
	want := len(p.Placements)
	if m := mediaOf(p.Enum); m == mediaExtended || m == mediaAll {
		want = 1
	}
	expect.Equal(t, p.MaxInstances, want, p.Name, "max")
}

// What all instances of a layout have together is within the board.
func TestSums(t *testing.T) {
	forBoards(t, func(t *testing.T, b *Board, g *machine.GPU) {
		for _, l := range MaximalLayouts(g) {
			var mem uint64
			var slices, sms int
			for _, in := range l {
				p := profile(g, in.ProfileID)
				mem, slices, sms = mem+p.MemoryMiB*miB, slices+p.Slices, sms+p.SMs
			}
			top := profile(g, 0)
			if mem > top.MemoryMiB*miB || sms > b.Product.SMs || slices > top.Slices {
				t.Errorf("%s: %d MiB, %d SMs, %d slices", show(g, l), mem/miB, sms, slices)
			}
		}
	})
}

// An instance id is unique among all instances that can live together, by
// placement (the tree's rule) and also when the first free id is taken.
func TestInstanceIDs(t *testing.T) {
	forBoards(t, func(t *testing.T, _ *Board, g *machine.GPU) {
		if g.MIG == nil {
			return
		}
		for _, p := range g.MIG.Profiles {
			if len(p.InstanceIDs) < len(p.Placements) || slices.Max(p.InstanceIDs) > 14 {
				t.Errorf("%s: instance ids %v", p.Name, p.InstanceIDs)
			}
			for i, at := range p.Placements {
				node := g.MIG.MemorySlices/at.Size - 1 + at.Start/at.Size
				expect.Equal(t, p.InstanceIDs[i], node, p.Name, "at", at.Start, "id in the tree")
			}
		}
		for _, l := range Layouts(g) {
			taken := map[int]bool{}
			for _, in := range l {
				ids := profile(g, in.ProfileID).InstanceIDs
				i := slices.IndexFunc(ids, func(id int) bool { return !taken[id] })
				if i < 0 {
					t.Fatalf("%s: no id left for %v", show(g, l), in)
				}
				taken[ids[i]] = true
			}
		}
	})
}

func TestComputeProfiles(t *testing.T) {
	forBoards(t, func(t *testing.T, _ *Board, g *machine.GPU) {
		if g.MIG == nil {
			return
		}
		for _, p := range g.MIG.Profiles {
			spans := false
			enums, ids := map[int]bool{}, map[uint32]bool{}
			for _, c := range p.Compute {
				if enums[c.Enum] || ids[c.ID] {
					t.Errorf("%s: compute profile %d occurs twice", p.Name, c.ID)
				}
				enums[c.Enum], ids[c.ID] = true, true
				spans = spans || c.Slices == p.Slices && c.SMs == p.SMs
				if c.MaxInstances != p.Slices/c.Slices || c.SMs*c.MaxInstances > p.SMs {
					t.Errorf("%s: compute profile %+v does not fit", p.Name, c)
				}
			}
			if !spans {
				t.Errorf("%s: no compute profile spans the instance", p.Name)
			}
		}
	})
}

// nameExceptions are profiles whose name is not what go-nvlib computes from
// their memory. None is known at the memory sizes of these boards.
var nameExceptions = map[string]string{}

// Tools compute a profile's name from its share of the memory; what nvidia-smi
// printed must agree with our numbers.
func TestNames(t *testing.T) {
	suffix := map[int]string{
		gpuInstanceKinds["1_SLICE_REV1"]: "+me", gpuInstanceKinds["2_SLICE_REV1"]: "+me",
		gpuInstanceKinds["1_SLICE_GFX"]: "+gfx", gpuInstanceKinds["2_SLICE_GFX"]: "+gfx", gpuInstanceKinds["4_SLICE_GFX"]: "+gfx",
		gpuInstanceKinds["1_SLICE_ALL_ME"]: "+me.all", gpuInstanceKinds["2_SLICE_ALL_ME"]: "+me.all",
		gpuInstanceKinds["1_SLICE_NO_ME"]: "-me", gpuInstanceKinds["2_SLICE_NO_ME"]: "-me",
	}
	forBoards(t, func(t *testing.T, b *Board, g *machine.GPU) {
		if g.MIG == nil {
			return
		}
		for _, p := range g.MIG.Profiles {
			eighths := math.Ceil(8 * float64(p.MemoryMiB*miB) / float64(g.MemoryBytes))
			total := float64((g.MemoryBytes + 1<<30 - 1) >> 30)
			want := fmt.Sprintf("%dg.%dgb%s", p.Slices, int(math.Round(eighths/8*total)), suffix[p.Enum])
			if e, ok := nameExceptions[b.Name+"/"+p.Name]; ok {
				want = e
			}
			expect.Equal(t, p.Name, want, "computed name")
		}
	})
}

// show prints a layout for a failed test.
func show(g *machine.GPU, l Layout) string {
	var out []string
	for _, in := range l {
		name := fmt.Sprint(in.ProfileID)
		if p := profile(g, in.ProfileID); p != nil {
			name = p.Name
		}
		out = append(out, fmt.Sprintf("%s@%d", name, in.Placement.Start))
	}
	return strings.Join(out, " ")
}
