// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
)

// hardware holds partitions as a GPU does. It follows the hardware's rules
// directly and shares nothing with the counters under test:
//
//   - no two instances share a memory slice;
//   - no profile has more instances than it says;
//   - all instances together have at most the engines that the GPU has, which
//     is the most that any one profile has;
//   - nothing beside an undivided GPU.
type hardware struct {
	mig       *gpu.MIG
	instances []PartitionShape
}

// allows tells whether s can be made beside the instances that exist.
func (h *hardware) allows(s PartitionShape) bool {
	same := 1
	used := s.Profile.Resources
	for _, other := range h.instances {
		if other.Placement.Overlaps(s.Placement) {
			return false
		}
		if other.Profile.ID == s.Profile.ID {
			same++
		}
		r := other.Profile.Resources
		used.Decoders += r.Decoders
		used.Encoders += r.Encoders
		used.JPEGEngines += r.JPEGEngines
		used.OFAEngines += r.OFAEngines
	}
	var has gpu.Resources
	for _, p := range h.mig.Profiles {
		has.Decoders = max(has.Decoders, p.Resources.Decoders)
		has.Encoders = max(has.Encoders, p.Resources.Encoders)
		has.JPEGEngines = max(has.JPEGEngines, p.Resources.JPEGEngines)
		has.OFAEngines = max(has.OFAEngines, p.Resources.OFAEngines)
	}
	return same <= s.Profile.MaxInstances &&
		used.Decoders <= has.Decoders && used.Encoders <= has.Encoders &&
		used.JPEGEngines <= has.JPEGEngines && used.OFAEngines <= has.OFAEngines
}

// every is each profile at each placement, as the driver reports them.
func (h *hardware) every() []PartitionShape {
	var all []PartitionShape
	for _, p := range h.mig.Profiles {
		for _, at := range p.Placements {
			all = append(all, PartitionShape{Profile: p, Placement: at})
		}
	}
	return all
}

// visitLegal calls visit with every legal layout once, the empty one first.
// The layout is valid during the call only.
func visitLegal(mig *gpu.MIG, visit func(layout []PartitionShape)) {
	h := &hardware{mig: mig}
	all := h.every()
	var grow func(from int)
	grow = func(from int) {
		visit(h.instances)
		for n := from; n < len(all); n++ {
			if h.allows(all[n]) {
				h.instances = append(h.instances, all[n])
				grow(n + 1)
				h.instances = h.instances[:len(h.instances)-1]
			}
		}
	}
	grow(0)
}

// maximal tells whether no further instance fits.
func maximal(mig *gpu.MIG, layout []PartitionShape) bool {
	h := &hardware{mig: mig, instances: layout}
	return !slices.ContainsFunc(h.every(), h.allows)
}

// TestLegalLayouts checks the helper itself against counts made by hand.
func TestLegalLayouts(t *testing.T) {
	tests := map[string]struct {
		board    string
		profiles []string
		want     int // maximal layouts
	}{
		// The lower half holds 4g, 3g, or two of {2g, 1g+1g}: 6 ways. The upper
		// half holds 3g, or one of {2g, 1g+1g} and a 1g: 3 ways. Or 7g.
		"8 slices": {"h100-80-sxm", []string{"1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"}, 6*3 + 1},
		// Two of {2g, 1g+1g}, or 4g.
		"4 slices":  {"a30", []string{"1g.6gb", "2g.12gb", "4g.24gb"}, 2*2 + 1},
		"12 slices": {"rtx-pro-6000", []string{"1g.24gb", "2g.48gb", "4g.96gb"}, 2*2 + 1},
		// One of four has all media engines, the others have none or are absent:
		// four places, or none has and all four are without.
		"all media engines": {"rtx-pro-6000", []string{"1g.24gb-me", "1g.24gb+me.all"}, 4 + 1},
		// The +me profile has one place of four or none.
		"one with media extensions": {"a30", []string{"1g.6gb", "1g.6gb+me"}, 4 + 1},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			mig := loadNode(t, tc.board).GPUs[0].MIG
			// The engines of the GPU are those of its largest profile.
			mig.Profiles = slices.DeleteFunc(mig.Profiles, func(p gpu.Profile) bool {
				return !slices.Contains(tc.profiles, p.Name)
			})
			if len(mig.Profiles) != len(tc.profiles) {
				t.Fatalf("%s has not all of %v", tc.board, tc.profiles)
			}
			got := 0
			visitLegal(mig, func(layout []PartitionShape) {
				if maximal(mig, layout) {
					got++
				}
			})
			expect.Same(t, got, tc.want, "maximal layouts")
		})
	}
}
