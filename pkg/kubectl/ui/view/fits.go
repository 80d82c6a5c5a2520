// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package view

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// fitsOf says what a GPU still has room for, each by itself, the largest first.
func fitsOf(g *fleet.GPU) []string {
	room := fleet.Free(g)
	if room.AtMost && !room.Nothing() {
		return []string{"unknown: claims or taint rules that you may not read"}
	}
	var all []string
	if room.Whole {
		all = append(all, "whole GPU")
	}
	partitions := slices.SortedStableFunc(slices.Values(room.Partitions), func(a, b fleet.PartitionRoom) int {
		return cmp.Or(cmp.Compare(b.MemoryBytes, a.MemoryBytes), cmp.Compare(a.Count, b.Count))
	})
	for _, p := range partitions {
		all = append(all, fmt.Sprintf("%d × %s", p.Count, p.Profile))
	}
	for _, s := range room.Shares {
		all = append(all, shareText(s))
	}
	return all
}

// shareText says what is left of a shared device. What one claim can get at most is said where
// others have a part of it already.
func shareText(s fleet.ShareRoom) string {
	kind := map[string]string{fleet.TypeMPS: "MPS share", fleet.TypeTimeSlice: "time-slice share"}[s.Type]
	text := fmt.Sprintf("%d × %s", s.Shares, cmp.Or(kind, s.Type))
	if s.Profile != "" {
		text += " of " + s.Profile
	}
	if len(s.Device.Held()) > 0 && s.MemoryBytes > 0 && s.SMPercent > 0 {
		text += fmt.Sprintf(", up to %.1f GiB and %d %% SM", float64(s.MemoryBytes)/(1<<30), s.SMPercent)
	}
	return text
}
