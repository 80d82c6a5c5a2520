// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/partage-dev/partage/test/must"
)

// search is a request that a node with eight H100 cannot satisfy. The scheduler finds
// out by trying all combinations of devices, with a limit of 10 seconds for a node.
type search struct {
	name string
	// free is how many places for a 1g the first GPUs have; the others are full.
	free     []int
	count    int64
	profile  string
	claims   int
	matching []string
}

const (
	parentUUID       = "gpu.nvidia.com/parentUUID"
	profileAttribute = "gpu.nvidia.com/profile"
)

var searches = []search{
	{name: "count: 2, one place", free: []int{1}, count: 2},
	{name: "count: 4, three places on a GPU", free: []int{3}, count: 4},
	{name: "count: 8, one GPU is free", free: []int{7}, count: 8},
	{name: "count: 4 of one GPU, three places on each", free: []int{3, 3, 3, 3, 3, 3, 3, 3}, count: 4, matching: []string{parentUUID}},
	{name: "count: 7 of one GPU, six places on each", free: []int{6, 6, 6, 6, 6, 6, 6, 6}, count: 7, matching: []string{parentUUID}},
	{
		name: "the same, and of one profile", free: []int{6, 6, 6, 6, 6, 6, 6, 6}, count: 7,
		matching: []string{parentUUID, profileAttribute},
	},
	{
		name: "the same, profile named", free: []int{6, 6, 6, 6, 6, 6, 6, 6}, count: 7, profile: "1g.10gb",
		matching: []string{parentUUID},
	},
	{name: "count: 8, profile named, one GPU is free", free: []int{7}, count: 8, profile: "1g.10gb"},
	{name: "count: 12, profile named, eleven places", free: []int{7, 4}, count: 12, profile: "1g.10gb"},
	{name: "5 claims in a pod, profile named, four places", free: []int{4}, count: 1, profile: "1g.10gb", claims: 5},
	{name: "7 claims in a pod, profile named, six places", free: []int{6}, count: 1, profile: "1g.10gb", claims: 7},
}

// steps is how many devices the scheduler tries to go on from, which does not depend on
// the machine. The search must end without a result.
func (c search) steps(tb testing.TB, i *Inventory) int64 {
	tb.Helper()
	s := newScheduler(tb, i.ResourceSlices(testOptions))
	gpus, taken := map[string]int{}, map[string]int{}
	for _, d := range i.Devices() {
		address := d.GPU.PCIAddress
		if _, known := gpus[address]; !known {
			gpus[address] = len(gpus)
		}
		room := 0
		if n := gpus[address]; n < len(c.free) {
			room = c.free[n]
		}
		if d.Kind == Partition && d.Partition.Profile.Name == "1g.10gb" && taken[address] < 7-room {
			taken[address]++
			s.keep(resourceapi.DeviceRequestAllocationResult{Device: d.Name})
		}
	}
	r := request("mig", c.count)
	if c.profile != "" {
		r = request("mig", c.count, `device.attributes["gpu.nvidia.com"].profile == "`+c.profile+`"`)
	}
	var claims []*resourceapi.ResourceClaim
	for n := range max(1, c.claims) {
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("claim-", n)}}
		claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{r}
		for _, name := range c.matching {
			claim.Spec.Devices.Constraints = append(claim.Spec.Devices.Constraints,
				resourceapi.DeviceConstraint{MatchAttribute: new(resourceapi.FullyQualifiedName(name))})
		}
		claims = append(claims, claim)
	}
	state := structured.AllocatedState{
		AllocatedDevices: s.allocated, AllocatedSharedDeviceIDs: s.shares, AggregatedCapacity: s.consumed,
	}
	allocator, err := structured.NewAllocator(context.Background(), defaultFeatures, state, s, s.slices, s.cel)
	if err != nil {
		tb.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: testOptions.NodeName}}
	if results, err := allocator.Allocate(context.Background(), node, claims); err != nil || results != nil {
		tb.Fatalf("%s: got %v, %v", c.name, results, err)
	}
	// The type of the statistics is internal.
	stats := reflect.ValueOf(allocator).MethodByName("GetStats").Call(nil)[0]
	return stats.FieldByName("NumAllocateOneInvocations").Int()
}

// TestSearch holds what searches without a result cost against testdata/searches.txt: what
// is published decides how many combinations there are. docs/how-to/slow-requests.md has them,
// and what to write instead.
func TestSearch(t *testing.T) {
	var golden strings.Builder
	table := tabwriter.NewWriter(&golden, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "8 H100, partitions\tsteps by default\twith variants")
	for _, c := range searches {
		// GPUs that are full cost time and no steps.
		node := replicate(loadNode(t, "h100-80-sxm"), len(c.free))
		steps, withVariants := c.steps(t, inventoryOf(t, node, Terms{})), "not counted"
		if steps > 10_000 {
			t.Errorf("%s: %d steps", c.name, steps)
		}
		if len(c.free) < 8 || steps < 1000 {
			withVariants = fmt.Sprint(c.steps(t, inventoryOf(t, node, everything)))
		}
		fmt.Fprintf(table, "%s\t%d\t%s\n", c.name, steps, withVariants)
	}
	must.Do(t, table.Flush())
	compareGolden(t, "searches.txt", golden.String())
}
