// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Instance is one GPU instance of a layout.
type Instance struct {
	ProfileID uint32
	Placement machine.Placement
}

// Layout is a set of GPU instances that exist at the same time, ordered by
// where they start.
type Layout []Instance

// Legal reports whether the GPU can hold all instances of a layout at once; the
// error says which rule it breaks. It knows the hardware's rules only and
// nothing of counters or slices, so that tests can hold a driver's accounting
// against it:
//
//   - a profile goes to one of its placements, and no two instances share a
//     memory slice;
//   - there are at most as many instances of a profile as it says;
//   - engines are not shared: those of all instances are within the board's;
//   - beside an instance with all media engines only those without any are
//     possible, and only one instance has the media extensions.
func Legal(g *machine.GPU, layout Layout) error {
	if g.MIG == nil {
		return errors.New("the GPU cannot be partitioned")
	}
	used := make([]bool, g.MIG.MemorySlices)
	count := map[uint32]int{}
	var engines, board engineSum
	for i := range g.MIG.Profiles {
		board.raise(&g.MIG.Profiles[i])
	}
	var extended, all, media []string
	for _, in := range layout {
		p := profile(g, in.ProfileID)
		if p == nil {
			return fmt.Errorf("profile %d does not exist", in.ProfileID)
		}
		if err := occupy(used, p, in.Placement); err != nil {
			return err
		}
		if count[p.ID]++; count[p.ID] > p.MaxInstances {
			return fmt.Errorf("%s: at most %d instances", p.Name, p.MaxInstances)
		}
		engines.add(p)
		switch mediaOf(p.Enum) {
		case mediaExtended:
			extended = append(extended, p.Name)
		case mediaAll:
			extended, all = append(extended, p.Name), append(all, p.Name)
		}
		if mediaOf(p.Enum) != mediaNone {
			media = append(media, p.Name)
		}
	}
	if len(extended) > 1 {
		return fmt.Errorf("media extensions on several instances: %v", extended)
	}
	if len(all) > 0 && len(media) > 1 {
		return fmt.Errorf("%s has all media engines, others want some: %v", all[0], media)
	}
	return engines.within(board)
}

// occupy marks an instance's slices, if it may be there.
func occupy(used []bool, p *machine.GIProfile, at machine.Placement) error {
	if !slices.Contains(p.Placements, at) {
		return fmt.Errorf("%s cannot be at %d:%d", p.Name, at.Start, at.Size)
	}
	for s := at.Start; s < at.Start+at.Size; s++ {
		if used[s] {
			return fmt.Errorf("%s at %d:%d: slice %d is taken", p.Name, at.Start, at.Size, s)
		}
		used[s] = true
	}
	return nil
}

// Layouts is every legal layout of the GPU, the empty one included, in a
// fixed order. There are some thousands on a board with eight slices.
func Layouts(g *machine.GPU) []Layout {
	if g.MIG == nil {
		return nil
	}
	var out []Layout
	candidates := instances(g)
	var grow func(from int, layout Layout)
	grow = func(from int, layout Layout) {
		out = append(out, slices.Clone(layout))
		for i := from; i < len(candidates); i++ {
			// Rules only ever forbid more as instances are added, so an
			// illegal layout has no legal extension.
			if next := append(layout, candidates[i]); Legal(g, next) == nil {
				grow(i+1, next)
			}
		}
	}
	grow(0, nil)
	return out
}

// MaximalLayouts is every legal layout to which no instance can be added.
func MaximalLayouts(g *machine.GPU) []Layout {
	candidates := []Instance(nil)
	if g.MIG != nil {
		candidates = instances(g)
	}
	return slices.DeleteFunc(Layouts(g), func(l Layout) bool {
		return slices.ContainsFunc(candidates, func(in Instance) bool {
			return Legal(g, append(slices.Clone(l), in)) == nil
		})
	})
}

// instances is every profile at every placement, by start and profile.
func instances(g *machine.GPU) []Instance {
	var out []Instance
	for _, p := range g.MIG.Profiles {
		for _, at := range p.Placements {
			out = append(out, Instance{ProfileID: p.ID, Placement: at})
		}
	}
	slices.SortStableFunc(out, func(a, b Instance) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) })
	return out
}

func profile(g *machine.GPU, id uint32) *machine.GIProfile {
	for i := range g.MIG.Profiles {
		if g.MIG.Profiles[i].ID == id {
			return &g.MIG.Profiles[i]
		}
	}
	return nil
}

// What a profile takes of the media engines, from the comments in nvml.h.
const (
	mediaSome = iota
	mediaNone
	mediaExtended
	mediaAll
)

func mediaOf(enum int) int {
	switch enum {
	case gpuInstanceKinds["1_SLICE_NO_ME"], gpuInstanceKinds["2_SLICE_NO_ME"]:
		return mediaNone
	case gpuInstanceKinds["1_SLICE_REV1"], gpuInstanceKinds["2_SLICE_REV1"]:
		return mediaExtended
	case gpuInstanceKinds["1_SLICE_ALL_ME"], gpuInstanceKinds["2_SLICE_ALL_ME"]:
		return mediaAll
	}
	return mediaSome
}

// engineSum counts engines: copy, decoder, encoder, JPEG, OFA.
type engineSum [5]int

func enginesOf(p *machine.GIProfile) engineSum {
	return engineSum{p.CopyEngines, p.Decoders, p.Encoders, p.JPEG, p.OFA}
}

func (s *engineSum) add(p *machine.GIProfile) {
	for i, n := range enginesOf(p) {
		s[i] += n
	}
}

// raise makes s hold at least p's engines. The board has those of its largest
// profile.
func (s *engineSum) raise(p *machine.GIProfile) {
	for i, n := range enginesOf(p) {
		s[i] = max(s[i], n)
	}
}

func (s engineSum) within(board engineSum) error {
	for i, name := range []string{"copy engines", "decoders", "encoders", "JPEG engines", "OFAs"} {
		if s[i] > board[i] {
			return fmt.Errorf("%d %s wanted, the board has %d", s[i], name, board[i])
		}
	}
	return nil
}
