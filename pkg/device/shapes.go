// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// usableShapes lists every profile at every placement, the most important profile
// first. Facts that make no sense are left out and reported, so that the rest of the
// GPU can be used.
func usableShapes(mig *gpu.MIG) ([]PartitionShape, []error) {
	var shapes []PartitionShape
	var problems []error
	seen := map[uint32]bool{}
	for _, p := range byImportance(mig.Profiles) {
		if seen[p.ID] {
			problems = append(problems, fmt.Errorf("profile %s is left out: another profile has its ID %d", p.Name, p.ID))
			continue
		}
		seen[p.ID] = true
		usable, bad := usablePlacements(p, mig.MemorySlices)
		problems = append(problems, bad...)
		for _, at := range usable {
			shapes = append(shapes, PartitionShape{Profile: p, Placement: at})
		}
	}
	return shapes, problems
}

// byImportance orders profiles for the case that not all fit into a slice: those
// that are no variant come first, because every layout can be made of them.
func byImportance(profiles []gpu.Profile) []gpu.Profile {
	ordered := slices.Clone(profiles)
	slices.SortStableFunc(ordered, func(a, b gpu.Profile) int {
		return cmp.Or(
			cmp.Compare(oneIf(policy.IsVariant(a.Name)), oneIf(policy.IsVariant(b.Name))),
			cmp.Compare(a.ID, b.ID))
	})
	return ordered
}

func usablePlacements(p gpu.Profile, memorySlices int) ([]gpu.Placement, []error) {
	var usable []gpu.Placement
	var problems []error
	starts := map[int]bool{}
	for _, at := range p.Placements {
		switch {
		case at.Start < 0 || at.Size < 1 || at.Start+at.Size > memorySlices:
			problems = append(problems, fmt.Errorf("profile %s at %d:%d is left out: not within the GPU's %d memory slices",
				p.Name, at.Start, at.Size, memorySlices))
		case starts[at.Start]:
			problems = append(problems, fmt.Errorf("profile %s at %d:%d is left out: the profile has another placement there",
				p.Name, at.Start, at.Size))
		default:
			starts[at.Start] = true
			usable = append(usable, at)
		}
	}
	return usable, problems
}
