// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"cmp"
	"context"
	"math/bits"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// maxHeld is more devices than claims can have of one GPU at the same time.
const maxHeld = 16

// addDrains adds what would have to end for each profile that fits nowhere, or for the one that
// was asked for, where it does not fit.
func (f *finder) addDrains(ctx context.Context) {
	for _, total := range f.report.Profiles {
		if f.options.Profile == "" && total.Now > 0 {
			continue
		}
		var all []*candidate
		for _, b := range f.boards {
			if len(b.partitions[total.Profile]) > 0 && b.count(total.Profile, b.held) == 0 {
				all = append(all, b.drains(total.Profile)...)
			}
		}
		slices.SortStableFunc(all, func(a, b *candidate) int { return a.compare(b) })
		shown := 0
		for _, c := range all {
			if f.options.Limit > 0 && shown == f.options.Limit {
				break
			}
			if !f.judge.freed(ctx, c.gpu, total.Profile, c.claims) {
				f.report.Unconfirmed++
				continue
			}
			f.report.Drains = append(f.report.Drains, c.drain(total.Profile))
			shown++
		}
	}
}

// candidate are claims that would have to end.
type candidate struct {
	gpu    *fleet.GPU
	claims []*resourceapi.ResourceClaim
	// fixed is how many of them cannot be drained, pods how many would be, and memory what the
	// claims have of this GPU.
	fixed, pods int
	memory      int64
	infos       []Claim
}

// compare orders by cost: claims that cannot be drained, pods, claims, memory.
func (c *candidate) compare(other *candidate) int {
	return cmp.Or(
		cmp.Compare(c.fixed, other.fixed), cmp.Compare(c.pods, other.pods),
		cmp.Compare(len(c.claims), len(other.claims)), cmp.Compare(c.memory, other.memory))
}

func (c *candidate) drain(profile string) Drain {
	return Drain{Profile: profile, Node: c.gpu.Node.Name, GPU: address(c.gpu), Claims: c.infos, Drainable: c.fixed == 0}
}

// drains returns the sets of claims whose end lets a partition of a profile fit, without those
// that contain a smaller one.
func (b *board) drains(profile string) []*candidate {
	if len(b.held) == 0 || len(b.held) > maxHeld {
		return nil
	}
	// Claims are bits, and so are the claims of each held device.
	var claims []*resourceapi.ResourceClaim
	holders := make([][]int, len(b.held))
	for i, d := range b.held {
		for _, h := range d.Held() {
			at := slices.Index(claims, h.Claim)
			if at < 0 {
				claims = append(claims, h.Claim)
				at = len(claims) - 1
			}
			holders[i] = append(holders[i], at)
		}
	}
	// Sets of devices from small to large: a set of claims that contains another is found later.
	var sets []uint
	for set := uint(1); set < 1<<len(b.held); set++ {
		sets = append(sets, set)
	}
	slices.SortStableFunc(sets, func(x, y uint) int { return cmp.Compare(bits.OnesCount(x), bits.OnesCount(y)) })
	var found [][]int
	for _, set := range sets {
		var ended []int
		for i := range b.held {
			if set&(1<<i) != 0 {
				ended = append(ended, holders[i]...)
			}
		}
		slices.Sort(ended)
		ended = slices.Compact(ended)
		if !b.fitsWithout(profile, holders, ended) {
			continue
		}
		found = append(found, ended)
	}
	// A claim may have several devices, so that a larger set of devices can be of fewer claims.
	slices.SortStableFunc(found, func(x, y []int) int { return cmp.Compare(len(x), len(y)) })
	var minimal [][]int
	for _, ended := range found {
		if !slices.ContainsFunc(minimal, func(smaller []int) bool { return contains(ended, smaller) }) {
			minimal = append(minimal, ended)
		}
	}
	var out []*candidate
	for _, ended := range minimal {
		out = append(out, b.candidate(claims, ended))
	}
	return out
}

// contains reports whether a has all elements of b.
func contains(a, b []int) bool {
	for _, n := range b {
		if !slices.Contains(a, n) {
			return false
		}
	}
	return true
}

// fitsWithout reports whether a partition fits once these claims have ended.
func (b *board) fitsWithout(profile string, holders [][]int, ended []int) bool {
	var held []*fleet.Device
	for i, d := range b.held {
		if !contains(ended, holders[i]) {
			held = append(held, d)
		}
	}
	left := b.left(held)
	return slices.ContainsFunc(b.free(profile, held), left.fit)
}

func (b *board) candidate(claims []*resourceapi.ResourceClaim, ended []int) *candidate {
	c := &candidate{gpu: b.gpu}
	pods := map[*corev1.Pod]bool{}
	for _, n := range ended {
		claim := claims[n]
		info := Claim{Namespace: claim.Namespace, Name: claim.Name}
		var users []*corev1.Pod
		for _, d := range b.held {
			for _, h := range d.Held() {
				if h.Claim != claim {
					continue
				}
				info.Devices = append(info.Devices, d.Name)
				memory := d.Published.Capacity[fleet.CapacityMemory]
				if consumed, shared := h.Result.ConsumedCapacity[fleet.CapacityMemory]; shared {
					c.memory += consumed.Value()
				} else {
					c.memory += memory.Value.Value()
				}
				users = h.Pods
			}
		}
		for _, p := range users {
			pods[p] = true
			info.Pods = append(info.Pods, p.Name)
		}
		if info.Why = notDrainable(claim, users); info.Why != "" {
			c.fixed++
		}
		info.Drainable = info.Why == ""
		c.claims = append(c.claims, claim)
		c.infos = append(c.infos, info)
	}
	c.pods = len(pods)
	return c
}

// notDrainable says why nobody would make the pods of a claim anew, or "".
func notDrainable(claim *resourceapi.ResourceClaim, users []*corev1.Pod) string {
	if len(claim.Status.ReservedFor) == 0 {
		return "no pod uses it"
	}
	if len(users) < len(claim.Status.ReservedFor) {
		return "not all that use it can be read"
	}
	for _, p := range users {
		if metav1.GetControllerOf(p) == nil {
			return "pod " + p.Name + " has no controller"
		}
	}
	return ""
}
