// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package view

import (
	"cmp"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// fitsOf says what a GPU still has room for, each by itself, the largest first.
func fitsOf(g *fleet.GPU) []string {
	taken, idle := takenSlices(g)
	places := map[string][]*fleet.Device{}
	var profiles, whole, shares []string
	for _, d := range g.Devices {
		switch {
		case slices.ContainsFunc(d.Taints, keepsAway):
		case d.Type == string(device.Whole):
			if idle {
				whole = append(whole, "whole GPU")
			}
		case d.Type == string(device.Partition):
			if !overlaps(d, taken) && (len(d.Placement) > 0 || idle) {
				if places[d.Profile] == nil {
					profiles = append(profiles, d.Profile)
				}
				places[d.Profile] = append(places[d.Profile], d)
			}
		case ptr.Deref(d.Published.AllowMultipleAllocations, false):
			free := idle || len(d.Holdings) > 0 || len(d.Placement) > 0 && !overlaps(d, taken)
			if text := shareRoom(d); free && text != "" && !slices.Contains(shares, text) {
				shares = append(shares, text)
			}
		}
	}
	slices.SortStableFunc(profiles, func(a, b string) int {
		return cmp.Or(cmp.Compare(memoryOf(places[b][0]), memoryOf(places[a][0])), cmp.Compare(len(places[a]), len(places[b])))
	})
	all := whole
	for _, profile := range profiles {
		all = append(all, times(disjoint(places[profile]), profile))
	}
	return append(all, shares...)
}

// takenSlices are the memory slices that claims have. The GPU is idle if none have anything.
func takenSlices(g *fleet.GPU) (taken map[int]bool, idle bool) {
	taken, idle = map[int]bool{}, true
	for _, d := range g.Devices {
		if _, held := heldBlock(d, max(1, g.MemorySlices)); !held {
			continue
		}
		idle = false
		for _, slice := range d.Placement {
			taken[slice] = true
		}
		if len(d.Placement) == 0 {
			for slice := range max(1, g.MemorySlices) {
				taken[slice] = true
			}
		}
	}
	return taken, idle
}

func overlaps(d *fleet.Device, taken map[int]bool) bool {
	return slices.ContainsFunc(d.Placement, func(slice int) bool { return taken[slice] })
}

// disjoint returns how many of a profile's places can be used together: those that end first
// leave the most room.
func disjoint(places []*fleet.Device) int {
	end := func(d *fleet.Device) int {
		if len(d.Placement) == 0 {
			return 0
		}
		return slices.Max(d.Placement)
	}
	ordered := slices.SortedFunc(slices.Values(places), func(a, b *fleet.Device) int { return cmp.Compare(end(a), end(b)) })
	used, n := map[int]bool{}, 0
	for _, d := range ordered {
		if overlaps(d, used) || len(d.Placement) == 0 && n > 0 {
			continue
		}
		n++
		for _, slice := range d.Placement {
			used[slice] = true
		}
	}
	return n
}

// shareRoom says what is left of a shared device.
func shareRoom(d *fleet.Device) string {
	total := Amount{Memory: capacity(d.Published, "memory"), SM: capacity(d.Published, "smPercent"), Shares: capacity(d.Published, "shares")}
	left := total
	for _, h := range d.Holdings {
		a := amountOf(h.Result)
		left.Memory -= a.Memory
		left.SM -= a.SM
		left.Shares -= max(1, a.Shares)
	}
	if left.Shares < 1 || total.SM > 0 && left.SM < 1 || total.Memory > 0 && left.Memory <= 0 {
		return ""
	}
	of := map[string]string{string(device.MPS): "MPS share", string(device.TimeSlice): "time-slice share"}[d.Type]
	if d.Profile != "" {
		of += " of " + d.Profile
	}
	text := times(int(left.Shares), of)
	if len(d.Holdings) > 0 && total.SM > 0 {
		text += fmt.Sprintf(" (%s, %d %% SM)", gibibytes(left.Memory), left.SM)
	}
	return text
}

func gibibytes(n int64) string { return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30)) }

func times(n int, what string) string {
	return fmt.Sprintf("%d × %s", n, what)
}

func memoryOf(d *fleet.Device) int64 { return capacity(d.Published, "memory") }

func keepsAway(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone }
