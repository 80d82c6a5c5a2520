// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
)

// orderShapes sorts the partitions of a GPU into the order in which the
// scheduler, which takes the first that fits, should try them.
//
// Profiles are sorted from small to large, the placements of one profile by what
// they make impossible: the cost of a placement is the sum of the sizes of all
// larger placements that it overlaps. A placement is larger if it has more memory
// slices, or as many and more compute slices; variants of a profile with the same
// geometry count once. So 1g on an 8-slice GPU starts at 6, where no 2g or 4g can
// be, and 3g at 4, where it leaves room for 4g.
//
// Among equal costs, the placement whose smallest larger neighbour starts highest
// comes first, then the one with the lower start, so that one neighbour is filled
// up after the other. On an 8-slice GPU this gives 1g at 6, 4, 5, 2, 3, 0, 1.
func orderShapes(shapes []PartitionShape) []PartitionShape {
	geometries := make([]geometry, 0, len(shapes))
	for _, s := range shapes {
		if g := geometryOf(s); !slices.Contains(geometries, g) {
			geometries = append(geometries, g)
		}
	}
	ordered := slices.Clone(shapes)
	slices.SortStableFunc(ordered, func(a, b PartitionShape) int {
		if size := compareProfiles(a, b); size != 0 {
			return size
		}
		costA, nearestA := placementCost(geometryOf(a), geometries)
		costB, nearestB := placementCost(geometryOf(b), geometries)
		return cmp.Or(cmp.Compare(costA, costB), cmp.Compare(nearestB, nearestA), cmp.Compare(a.Placement.Start, b.Placement.Start))
	})
	return ordered
}

// compareProfiles orders profiles by how much of the GPU they take, and by ID where
// two take the same.
func compareProfiles(a, b PartitionShape) int {
	return cmp.Or(
		cmp.Compare(a.Placement.Size, b.Placement.Size),
		cmp.Compare(a.Profile.Slices, b.Profile.Slices),
		cmp.Compare(mediaEngines(a.Profile), mediaEngines(b.Profile)),
		cmp.Compare(a.Profile.ID, b.Profile.ID))
}

func mediaEngines(p gpu.Profile) int {
	r := p.Resources
	return r.Decoders + r.Encoders + r.JPEGEngines + r.OFAEngines
}

// geometry is what matters for fragmentation: position, size and compute slices.
type geometry struct {
	at     gpu.Placement
	slices int
}

func geometryOf(s PartitionShape) geometry {
	return geometry{at: s.Placement, slices: s.Profile.Slices}
}

func (g geometry) compareSize(h geometry) int {
	return cmp.Or(cmp.Compare(g.at.Size, h.at.Size), cmp.Compare(g.slices, h.slices))
}

// placementCost adds up the larger placements that g makes impossible, and returns
// where the smallest of them starts (-1: there is none).
func placementCost(g geometry, all []geometry) (cost, nearest int) {
	var smallest *geometry
	for n := range all {
		larger := &all[n]
		if larger.compareSize(g) <= 0 || !larger.at.Overlaps(g.at) {
			continue
		}
		cost += larger.at.Size
		if smallest == nil || larger.compareSize(*smallest) < 0 {
			smallest = larger
		}
	}
	if smallest == nil {
		return cost, -1
	}
	return cost, smallest.at.Start
}
