// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// TestMemoryCounter: on every board every device that a claim can have draws on a counter
// "memory" as many bytes as the GPU or the partition has. That it refuses nothing which fits
// otherwise is what TestCountersAgainstHardware goes through.
func TestMemoryCounter(t *testing.T) {
	shares := sharing(policy.PartitionShares{Profiles: []string{"1g.5gb", "1g.6gb", "1g.10gb", "1g.24gb"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2)})
	for _, b := range testBoards(t) {
		offers := map[string]Terms{"everything": everything, "shares of partitions": shares}
		if whole, _ := possibleKinds(b.gpu()); whole {
			offers["the whole GPU"] = wholeOnly
		}
		for name, terms := range offers {
			i := inventoryOf(t, b.node, terms).With(Status{Static: []Static{firstPartition(b.gpu())}})
			objects := i.ResourceSlices(testOptions)
			checkAPI(t, objects)
			total := counterSet(objects)["memory"]
			if own := b.gpu().Resources.MemoryBytes; total.Value.Value() != int64(own) {
				t.Errorf("%s, %s: the counter has %s, the GPU has %d bytes", b.name, name, total.Value.String(), own)
			}
			for _, published := range devicesOf(objects) {
				d, ok := i.Lookup(published.Name)
				want := b.gpu().Resources.MemoryBytes
				if ok && d.Partition != nil {
					want = d.Partition.Profile.Resources.MemoryBytes
				}
				if draws := drawn(published, "memory"); !ok || draws == 0 || draws != int64(want) {
					t.Errorf("%s, %s: %s draws %d bytes of memory, want %d", b.name, name, published.Name, draws, want)
				}
			}
		}
	}
}

// wholeOnly offers nothing but whole GPUs.
var wholeOnly = Terms{Policy: &policy.Policy{Default: policy.Offer{Whole: true}}}

// firstPartition is one that somebody else made, if the GPU can have any.
func firstPartition(g *gpu.GPU) Static {
	if g.MIG == nil || len(g.MIG.Profiles) == 0 {
		return Static{}
	}
	p := g.MIG.Profiles[0]
	return Static{PCIAddress: g.PCIAddress, ProfileID: p.ID, Placement: p.Placements[0], UUID: "MIG-1"}
}

// TestMemoryCounterOfMoreThanThereIs: partitions that have more memory together than the
// GPU says it has fit beside each other all the same.
func TestMemoryCounterOfMoreThanThereIs(t *testing.T) {
	const gib = 1 << 30
	profiles := []gpu.Profile{
		{
			ID: 1, Name: "1g.10gb", Slices: 1, MaxInstances: 2, Resources: gpu.Resources{MemoryBytes: 10 * gib},
			Placements: []gpu.Placement{{Start: 0, Size: 1}, {Start: 1, Size: 1}},
		},
		{
			ID: 2, Name: "2g.18gb", Slices: 2, MaxInstances: 1, Resources: gpu.Resources{MemoryBytes: 18 * gib},
			Placements: []gpu.Placement{{Start: 0, Size: 2}},
		},
	}
	for has, want := range map[uint64]int64{0: 20 * gib, 19 * gib: 20 * gib, 21 * gib: 21 * gib} {
		node := &gpu.Node{GPUs: []gpu.GPU{{
			PCIAddress: "0000:01:00.0", Resources: gpu.Resources{MemoryBytes: has},
			MIG: &gpu.MIG{Dynamic: true, MemorySlices: 2, Profiles: profiles},
		}}}
		memory := counterSet(mustInventory(t, node).ResourceSlices(testOptions))["memory"]
		expect.Same(t, memory.Value.Value(), want, fmt.Sprintf("the counter of a GPU that has %d bytes", has))
		compareWithHardware(t, node)
	}
}

// TestUnknownMemory: where the driver does not report the memory, there is no counter of it,
// and the devices of a GPU exclude each other without one.
func TestUnknownMemory(t *testing.T) {
	for _, board := range []string{"t4", "h100-80-sxm"} {
		node := loadNode(t, board)
		g := &node.GPUs[0]
		g.Resources.MemoryBytes = 0
		if g.MIG != nil {
			for n := range g.MIG.Profiles {
				g.MIG.Profiles[n].Resources.MemoryBytes = 0
			}
		}
		i, _ := problemsOf(t, node, everything) // there is nothing to divide among MPS clients
		objects := i.ResourceSlices(testOptions)
		checkAPI(t, objects)
		if _, found := counterSet(objects)["memory"]; found {
			t.Errorf("%s: there is a counter of memory", board)
		}
		ledger := newLedger(t, objects)
		for _, d := range i.Devices() {
			if ledger.fits(GPUName(g.PCIAddress), d.Name) {
				t.Errorf("%s: the whole GPU fits beside %s", board, d.Name)
			}
		}
	}
}

// counterSet returns the counters of the only GPU.
func counterSet(objects []resourceapi.ResourceSlice) map[string]resourceapi.Counter {
	for _, object := range objects {
		for _, set := range object.Spec.SharedCounters {
			return set.Counters
		}
	}
	return nil
}

// drawn is what a device draws on a counter.
func drawn(d resourceapi.Device, counter string) int64 {
	var total int64
	for _, consumption := range d.ConsumesCounters {
		value := consumption.Counters[counter].Value
		total += value.Value()
	}
	return total
}

// sharedTerms share the GPU and its smallest partitions in both ways.
func sharedTerms(limited bool, overcommit float64) Terms {
	terms := sharing(policy.PartitionShares{Profiles: []string{"1g.10gb"}, MPS: mpsOf(2), TimeSlice: timeSliceOf(2)})
	terms.Limited = limited
	offer := terms.Policy.Default
	offer.TimeSlice = &policy.TimeSliceOffer{Clients: 4, MemoryOvercommit: overcommit}
	offer.MPS = &policy.MPSOffer{Clients: 4, MemoryOvercommit: overcommit}
	terms.Policy = &policy.Policy{Default: offer}
	return terms
}

// TestShareAttributes: who holds the limit depends on the driver, on the library and on what is shared. How well claims are
// isolated does not depend on the driver.
func TestShareAttributes(t *testing.T) {
	for _, test := range []struct {
		driver, library bool
		want            map[string]string // isolation and limit by the device's short name
	}{
		{false, false, map[string]string{"mps": "process server", "timeslice": "none none", "1g10gb-6-mps": "software server", "1g10gb-6-timeslice": "none none"}},
		{false, true, map[string]string{"mps": "process server", "timeslice": "software client", "1g10gb-6-mps": "software server", "1g10gb-6-timeslice": "software client"}},
		{true, false, map[string]string{"mps": "process driver", "timeslice": "none driver", "1g10gb-6-mps": "software server", "1g10gb-6-timeslice": "none none"}},
		{true, true, map[string]string{"mps": "process driver", "timeslice": "software driver", "1g10gb-6-mps": "software server", "1g10gb-6-timeslice": "software client"}},
	} {
		test.want["whole"], test.want["1g10gb-6"] = "hardware ", "hardware " // one claim has it alone
		node := loadNode(t, "h100-80-sxm")
		node.GPUs[0].MemoryLimits = test.driver
		for _, d := range devicesOf(inventoryOf(t, node, sharedTerms(test.library, 1)).ResourceSlices(testOptions)) {
			text := func(name resourceapi.QualifiedName) string { return *d.Attributes[name].StringValue }
			want, is := test.want[shortName(d.Name)]
			if got := text("isolation") + " " + text("memoryLimit"); is && got != want {
				t.Errorf("driver %t, library %t: %s is %q, want %q", test.driver, test.library, d.Name, got, want)
			}
			delete(test.want, shortName(d.Name))
			uuid, profile := node.GPUs[0].UUID, ""
			if strings.Contains(d.Name, "-mig-1g10gb-6") {
				uuid, profile = "", "1g.10gb"
			}
			if is && (text("uuid") != uuid || text("profile") != profile || text("parentUUID") != node.GPUs[0].UUID) {
				t.Errorf("%s is of %q, of %q, %q", d.Name, text("parentUUID"), text("uuid"), text("profile"))
			}
		}
		if len(test.want) > 0 {
			t.Errorf("driver %t, library %t: not published: %v", test.driver, test.library, test.want)
		}
	}
}

// TestHeldShares: where the driver holds time-slice shares, a claim that asks for no memory has an equal part of it. What is
// guaranteed to all of them fits, even where the policy overcommits.
func TestHeldShares(t *testing.T) {
	node := loadNode(t, "t4")
	node.GPUs[0].MemoryLimits = true
	for _, overcommit := range []float64{1, 1.15, 2, 7} {
		for _, d := range inventoryOf(t, node, sharedTerms(false, overcommit)).Devices() {
			s := d.Share
			if s == nil {
				continue
			}
			if !s.Held || s.DefaultMemoryBytes == 0 || s.DefaultMemoryBytes > s.MaxMemoryBytes || d.Kind == TimeSlice && s.Percent != 0 {
				t.Errorf("%s: %+v", d.Name, s)
			}
			soft := s.Guaranteed(s.DefaultMemoryBytes)
			if overcommit == 1 && soft != s.DefaultMemoryBytes || soft > s.DefaultMemoryBytes || soft < mib || soft%mib != 0 {
				t.Errorf("%s, overcommitted by %v: %d of %d bytes are guaranteed", d.Name, overcommit, soft, s.DefaultMemoryBytes)
			}
			// As many claims as the scheduler accounts memory for.
			if claims := s.MemoryBytes / s.DefaultMemoryBytes; claims*soft > s.MaxMemoryBytes {
				t.Errorf("%s, overcommitted by %v: %d claims with %d bytes each, of %d", d.Name, overcommit, claims, soft, s.MaxMemoryBytes)
			}
			if least := s.Guaranteed(1); least != mib {
				t.Errorf("%d bytes at least", least)
			}
		}
	}
}

// TestAllocatableMemory checks on all boards that it is the whole GPU where that is offered,
// and otherwise the best of all legal layouts, which is never more than the GPU has.
func TestAllocatableMemory(t *testing.T) {
	t.Parallel()
	for _, b := range testBoards(t) {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			checkAllocatable(t, b.node)
		})
	}
}

func checkAllocatable(t *testing.T, node *gpu.Node) {
	t.Helper()
	whole := inventoryOf(t, node, Terms{})
	for _, s := range whole.Summaries() {
		if has := s.GPU.Resources.MemoryBytes; s.AllocatableBytes > has || s.AllocatableBytes == 0 {
			t.Errorf("of %d bytes %d can be allocated", has, s.AllocatableBytes)
		} else if _, whole := possibleKinds(s.GPU); !whole && s.AllocatableBytes != has {
			t.Errorf("of a GPU that is offered whole %d can be allocated, it has %d", s.AllocatableBytes, has)
		}
	}
	for _, offer := range []string{"{kinds: [mig]}", "{kinds: [mig], mig: {variants: true}}"} {
		partitions, _ := problemsOf(t, node, decoded(t, "default: "+offer))
		checkLayouts(t, partitions)
	}
}

// checkLayouts compares with all legal layouts of published partitions.
func checkLayouts(t *testing.T, partitions *Inventory) {
	t.Helper()
	for _, s := range partitions.Summaries() {
		if s.GPU.MIG == nil || len(s.Devices) == 0 {
			continue
		}
		offered := map[gpu.Placement]map[uint32]bool{}
		for _, d := range s.Devices {
			if offered[d.Partition.Placement] == nil {
				offered[d.Partition.Placement] = map[uint32]bool{}
			}
			offered[d.Partition.Placement][d.Partition.Profile.ID] = true
		}
		var best, sum uint64
		visitLegal(s.GPU.MIG, func(layout []PartitionShape) {
			var memory uint64
			for _, p := range layout {
				if !offered[p.Placement][p.Profile.ID] {
					return
				}
				memory += p.Profile.Resources.MemoryBytes
			}
			best = max(best, memory)
		})
		for _, d := range s.Devices {
			sum += d.Partition.Profile.Resources.MemoryBytes
		}
		if s.AllocatableBytes != best || s.AllocatableBytes >= sum {
			t.Errorf("%d bytes of partitions can be allocated, want %d, of %d in all devices", s.AllocatableBytes, best, sum)
		}
	}
}

// TestAllocatableShares: overcommitted memory is still there once.
func TestAllocatableShares(t *testing.T) {
	t.Parallel()
	inventory := inventoryOf(t, loadNode(t, "h100-80-sxm"), decoded(t, "default: {kinds: [timeslice], timeslice: {clients: 4, memoryOvercommit: 3}}"))
	for _, s := range inventory.Summaries() {
		expect.Same(t, s.AllocatableBytes, s.GPU.Resources.MemoryBytes, "bytes that can be allocated")
	}
}

func decoded(t *testing.T, text string) Terms {
	t.Helper()
	p := must.Get(policy.Decode([]byte("apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\n" + text)))(t)
	return Terms{Policy: p}
}
