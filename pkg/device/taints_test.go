// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
)

// tainted lists the reasons by device, without the GPU's part of the name.
func tainted(i *Inventory, o Options) map[string]string {
	out := map[string]string{}
	for _, d := range devicesOf(i.ResourceSlices(o)) {
		var keys []string
		for _, taint := range d.Taints {
			keys = append(keys, strings.TrimPrefix(taint.Key, o.Driver+"/"))
		}
		if keys != nil {
			out[shortName(d.Name)] = strings.Join(keys, " ")
		}
	}
	return out
}

func shortName(name string) string {
	short, _ := strings.CutPrefix(name, "gpu-0000-1b-00-0")
	if short == "" {
		return "whole"
	}
	return strings.TrimPrefix(strings.TrimPrefix(short, "-mig"), "-")
}

// overlapping are the devices of the H100 that share a memory slice with a place,
// all with the same taint.
func overlapping(t *testing.T, place gpu.Placement, reason Reason) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, d := range mustInventory(t, loadNode(t, "h100-80-sxm")).Devices() {
		if d.Partition == nil || d.Partition.Placement.Overlaps(place) {
			out[shortName(d.Name)] = string(reason)
		}
	}
	return out
}

// and changes entries; an empty one is removed.
func and(m map[string]string, pairs ...string) map[string]string {
	for pair := range slices.Chunk(pairs, 2) {
		if m[pair[0]] = pair[1]; pair[1] == "" {
			delete(m, pair[0])
		}
	}
	return m
}

// TestTaints is about one H100. What is said about other GPUs does not count.
func TestTaints(t *testing.T) {
	everywhere := func(reason string) map[string]string { return overlapping(t, at(0, 8), Reason(reason)) }
	extended := []string{
		"1g10gb-me-0", "1g10gb-me-1", "1g10gb-me-2", "1g10gb-me-3", "1g10gb-me-4", "1g10gb-me-5",
	}
	tests := map[string]struct {
		status Status
		want   map[string]string
	}{
		"all is well": {Status{}, map[string]string{}},
		"a static partition": {
			Status{Static: []Static{static(firstGPU, profile3g, at(4, 4), "MIG-1")}},
			overlapping(t, at(4, 4), Occupied)},
		"a static partition in the middle": {
			Status{Static: []Static{static(firstGPU, profile1g, at(2, 1), "MIG-1")}},
			overlapping(t, at(2, 1), Occupied)},
		"two of them": {
			Status{Static: []Static{static(firstGPU, profile1g, at(6, 1), "MIG-1"), static(firstGPU, profile3g, at(0, 4), "MIG-2")}},
			and(overlapping(t, at(0, 4), Occupied), "1g10gb-6", "occupied", "1g10gb-me-6", "occupied", "1g20gb-6", "occupied", "3g40gb-4", "occupied")},
		"one that has the only OFA engine": {
			Status{Static: []Static{static(firstGPU, profile1gMe, at(6, 1), "MIG-1")}},
			and(overlapping(t, at(6, 1), Occupied), pairsOf(extended, "occupied")...)},
		"one that is gone": {
			Status{Static: []Static{gone(static(firstGPU, profile1gMe, at(6, 1), "MIG-1"))}},
			map[string]string{"1g10gb-me-6-static": "gone"}},
		"one that is gone and another in the place": {
			Status{Static: []Static{gone(static(firstGPU, profile1g, at(6, 1), "MIG-1")), static(firstGPU, 15, at(6, 2), "MIG-2")}},
			and(overlapping(t, at(6, 2), Occupied), "1g10gb-6-static", "gone occupied")},
		"one that is gone and the same again": {
			Status{Static: []Static{gone(static(firstGPU, profile3g, at(4, 4), "MIG-1")), static(firstGPU, profile3g, at(4, 4), "MIG-2")}},
			overlapping(t, at(4, 4), Occupied)},
		"one of a profile that is not published": {
			Status{Static: []Static{static(firstGPU, 77, at(6, 1), "MIG-1")}},
			overlapping(t, at(6, 1), Occupied)},
		"one where its profile cannot be": {
			Status{Static: []Static{static(firstGPU, profile3g, at(2, 4), "MIG-1")}},
			overlapping(t, at(2, 4), Occupied)},
		"an instance without a compute instance": {
			Status{Conditions: []Condition{inPlace(firstGPU, at(0, 2), Occupied)}},
			overlapping(t, at(0, 2), Occupied)},
		"an instance of a known profile": {
			Status{Conditions: []Condition{ofProfile(inPlace(firstGPU, at(6, 1), ReleasePending), profile1gMe)}},
			and(overlapping(t, at(6, 1), ReleasePending), pairsOf(extended, "release-pending")...)},
		"an instance that uses nothing of what is scarce": {
			Status{Conditions: []Condition{ofProfile(inPlace(firstGPU, at(6, 1), ReleasePending), profile1g)}},
			overlapping(t, at(6, 1), ReleasePending)},
		"a profile that nobody knows": {
			Status{Conditions: []Condition{ofProfile(inPlace(firstGPU, at(6, 1), Occupied), 77)}},
			overlapping(t, at(6, 1), Occupied)},
		"the whole GPU": {
			Status{Conditions: []Condition{onGPU(firstGPU, Unresponsive)}}, everywhere("unresponsive")},
		"a static partition on a GPU that is lost": {
			Status{Static: []Static{gone(static(firstGPU, profile1g, at(0, 1), "MIG-1"))}, Conditions: []Condition{onGPU(firstGPU, Lost)}},
			and(everywhere("gpu-lost"), "1g10gb-0-static", "gone gpu-lost")},
		"a release in the place of a static partition": {
			Status{Static: []Static{static(firstGPU, profile3g, at(4, 4), "MIG-1")}, Conditions: []Condition{inPlace(firstGPU, at(4, 4), ReleasePending)}},
			and(overlapping(t, at(4, 4), "occupied release-pending"), "3g40gb-4-static", "release-pending")},
		"occupied by itself": {
			Status{Static: []Static{static(firstGPU, profile3g, at(4, 4), "MIG-1")}, Conditions: []Condition{inPlace(firstGPU, at(4, 4), Occupied)}},
			overlapping(t, at(4, 4), Occupied)},
		"each once": {
			Status{Conditions: []Condition{
				onGPU(firstGPU, Lost), onGPU(firstGPU, Unresponsive), onGPU(firstGPU, Lost), inPlace(firstGPU, at(0, 8), Lost),
				onGPU(firstGPU, ResetRequired), onGPU(firstGPU, Occupied), onGPU(firstGPU, ReleasePending), onGPU(firstGPU, Gone),
			}},
			everywhere("gone gpu-lost occupied release-pending reset-required unresponsive")},
		"exactly one partition": {
			Status{Conditions: []Condition{exactly(inPlace(firstGPU, at(6, 1), XID), profile1g)}},
			map[string]string{"1g10gb-6": "xid"}},
		"exactly one partition that others made": {
			Status{
				Static:     []Static{static(firstGPU, profile3g, at(4, 4), "MIG-1")},
				Conditions: []Condition{exactly(inPlace(firstGPU, at(4, 4), XID), profile3g)},
			},
			and(overlapping(t, at(4, 4), Occupied), "3g40gb-4-static", "xid", "3g40gb-4", "occupied xid")},
		"the only one with the OFA engine, exactly": {
			Status{Conditions: []Condition{exactly(inPlace(firstGPU, at(6, 1), XID), profile1gMe)}},
			map[string]string{"1g10gb-me-6": "xid"}},
		"what is nothing to partitions": {
			Status{
				Static:     []Static{gone(static(firstGPU, profile1g, at(0, 1), "MIG-1"))},
				Conditions: []Condition{{PCIAddress: firstGPU, Undivided: true, Reason: FabricUnhealthy}},
			},
			map[string]string{"whole": "fabric-unhealthy", "mps": "fabric-unhealthy", "timeslice": "fabric-unhealthy", "1g10gb-0-static": "gone"}},
		"one kind": {Status{Conditions: []Condition{{PCIAddress: firstGPU, Kind: MPS, Reason: MPSUnavailable}}}, map[string]string{"mps": "mps-unavailable"}},
		"another GPU": {
			Status{Static: []Static{static(secondGPU, profile1g, at(0, 1), "MIG-1")}, Conditions: []Condition{onGPU("", Lost), onGPU(thirdGPU, Lost)}},
			map[string]string{}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			i := mustInventory(t, loadNode(t, "h100-80-sxm"))
			expect.Same(t, tainted(i.With(tc.status), testOptions), tc.want, "taints")
			checkAPI(t, i.With(tc.status).ResourceSlices(testOptions))
			// Shares of partitions are out for the same reasons as the partitions.
			shared := inventoryOf(t, loadNode(t, "h100-80-sxm"), sharing(policy.PartitionShares{Profiles: []string{"1g.10gb", "1g.10gb+me"}, MPS: mpsOf(2)}))
			got := tainted(shared.With(tc.status), testOptions)
			for _, d := range shared.Devices() {
				if d.Share == nil || d.Partition == nil || name == "one kind" {
					continue
				}
				if base := tc.want[shortName(d.Share.Base)]; got[shortName(d.Name)] != base {
					t.Errorf("%s is tainted with %q, its partition with %q", d.Name, got[shortName(d.Name)], base)
				}
			}
			// With whole GPUs only, the GPU is tainted for what is in its parts.
			o := testOptions
			o.PartitionableDevices = false
			want := map[string]string{}
			if reasons, ok := tc.want["whole"]; ok {
				want["whole"] = reasons
			}
			objects := i.With(tc.status).ResourceSlices(o)
			if diff := cmp.Diff(want, tainted(i.With(tc.status), o)); diff != "" || len(devicesOf(objects)) != 1 {
				t.Errorf("taints without counters, on %d devices (-want +got):\n%s", len(devicesOf(objects)), diff)
			}
			checkAPI(t, objects)
		})
	}
}

func pairsOf(keys []string, value string) []string {
	var pairs []string
	for _, key := range keys {
		pairs = append(pairs, key, value)
	}
	return pairs
}

// TestShortage: one partition has two of four decoders and is named twice, which
// does not make it two. One in the place of the partition in question does not
// count.
func TestShortage(t *testing.T) {
	const profile1g, profile2g = 14, 5
	i := mustInventory(t, loadNode(t, "rtx-pro-6000")).With(Status{
		Static: []Static{static(firstGPU, profile2g, at(6, 6), "MIG-1")},
		Conditions: []Condition{
			ofProfile(inPlace(firstGPU, at(6, 6), Occupied), profile2g),
			ofProfile(inPlace(firstGPU, at(0, 3), ReleasePending), profile1g),
		},
	})
	got := tainted(i, testOptions)
	for name, want := range map[string]string{
		"2g48gb-0":        "release-pending",
		"1g24gb-0":        "release-pending",
		"1g24gb-3":        "",
		"1g24gb-me-all-3": "occupied release-pending",
		"1g24gb-no-me-3":  "",
	} {
		expect.Same(t, got[name], want, name)
	}
}

// TestGravestTaint: of one reason there is one taint, the gravest; which came last does not
// matter. Of more reasons than the API takes, those stay that keep pods away.
func TestGravestTaint(t *testing.T) {
	xid := func(value string, effect policy.Effect) Condition {
		return Condition{PCIAddress: firstGPU, Reason: XID, Value: value, Effect: effect}
	}
	type taint = resourceapi.DeviceTaint
	for name, tc := range map[string]struct {
		conditions []Condition
		want       []taint
	}{
		"one": {
			[]Condition{xid("94", policy.EffectNoExecute)},
			[]taint{{Key: "gpu.nvidia.com/xid", Value: "94", Effect: resourceapi.DeviceTaintEffectNoExecute}}},
		"the gravest": {
			[]Condition{xid("95", policy.EffectNoExecute), xid("31", policy.EffectNone), xid("48", policy.EffectNoSchedule)},
			[]taint{{Key: "gpu.nvidia.com/xid", Value: "95", Effect: resourceapi.DeviceTaintEffectNoExecute}}},
		"the smallest number of the same": {
			[]Condition{xid("119", policy.EffectNoExecute), xid("95", policy.EffectNoExecute)},
			[]taint{{Key: "gpu.nvidia.com/xid", Value: "95", Effect: resourceapi.DeviceTaintEffectNoExecute}}},
		"several keys": {
			[]Condition{xid("79", ""), onGPU(firstGPU, Lost), {PCIAddress: firstGPU, Reason: Unmonitored, Effect: policy.EffectNone}},
			[]taint{
				{Key: "gpu.nvidia.com/gpu-lost", Effect: resourceapi.DeviceTaintEffectNoSchedule},
				{Key: "gpu.nvidia.com/unmonitored", Effect: resourceapi.DeviceTaintEffectNone},
				{Key: "gpu.nvidia.com/xid", Value: "79", Effect: resourceapi.DeviceTaintEffectNoSchedule},
			}},
	} {
		t.Run(name, func(t *testing.T) {
			i := mustInventory(t, loadNode(t, "h100-80-sxm"))
			for range 2 {
				slices.Reverse(tc.conditions)
				objects := i.With(Status{Conditions: tc.conditions}).ResourceSlices(testOptions)
				checkAPI(t, objects)
				d := devicesOf(objects)[0]
				expect.Same(t, d.Taints, tc.want, "taints of "+d.Name)
			}
		})
	}
	var many []Condition
	for n := range 20 {
		many = append(many, Condition{PCIAddress: firstGPU, Reason: Reason(fmt.Sprintf("a%02d", n)), Effect: policy.EffectNone})
	}
	many = append(many, onGPU(firstGPU, Lost), xid("79", policy.EffectNoExecute))
	i := mustInventory(t, loadNode(t, "h100-80-sxm")).With(Status{Conditions: many})
	checkAPI(t, i.ResourceSlices(testOptions))
	if got := tainted(i, testOptions)["whole"]; !strings.HasPrefix(got, "a00 ") || !strings.HasSuffix(got, " a13 gpu-lost xid") {
		t.Errorf("of too many taints these are left: %s", got)
	}
	old := testOptions
	old.NoEffectNone = true
	expect.Same(t, tainted(i, old)["whole"], "gpu-lost xid", "for an API server that knows no effect None")
}
