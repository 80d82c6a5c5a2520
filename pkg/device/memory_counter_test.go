// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
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
		if got := memory.Value.Value(); got != want {
			t.Errorf("a GPU that has %d bytes: the counter has %d, want %d", has, got, want)
		}
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
