// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
)

// ledger does the scheduler's arithmetic on published counters, for one GPU.
type ledger struct {
	available []int64
	consumes  map[string][]int64 // by device name
}

func newLedger(t *testing.T, objects []resourceapi.ResourceSlice) *ledger {
	t.Helper()
	l := &ledger{consumes: map[string][]int64{}}
	var names []string
	for _, object := range objects {
		for _, set := range object.Spec.SharedCounters {
			for _, name := range slices.Sorted(maps.Keys(set.Counters)) {
				names = append(names, set.Name+"/"+name)
				value := set.Counters[name].Value
				l.available = append(l.available, value.Value())
			}
		}
	}
	for _, d := range devicesOf(objects) {
		uses := make([]int64, len(names))
		for _, consumption := range d.ConsumesCounters {
			for name, c := range consumption.Counters {
				n := slices.Index(names, consumption.CounterSet+"/"+name)
				if n < 0 {
					t.Fatalf("device %s consumes the unknown counter %s", d.Name, name)
				}
				uses[n] = c.Value.Value()
			}
		}
		l.consumes[d.Name] = uses
	}
	return l
}

// fits tells whether all these devices can be allocated at one time.
func (l *ledger) fits(devices ...string) bool {
	for n, left := range l.available {
		for _, d := range devices {
			left -= l.consumes[d][n]
		}
		if left < 0 {
			return false
		}
	}
	return true
}

// nameOf finds a partition's device on the only GPU.
func nameOf(t *testing.T, i *Inventory, s PartitionShape) string {
	t.Helper()
	for _, d := range i.Devices() {
		if d.Partition != nil && d.Partition.Profile.ID == s.Profile.ID && d.Partition.Placement == s.Placement {
			return d.Name
		}
	}
	t.Fatalf("profile %s at %d is not published", s.Profile.Name, s.Placement.Start)
	return ""
}

// compareWithHardware goes through all legal layouts of a GPU and every way to
// add one device: the counters allow exactly what the hardware allows.
func compareWithHardware(t *testing.T, node *gpu.Node) (layouts int) {
	t.Helper()
	i := mustInventory(t, node)
	g := &node.GPUs[0]
	ledger := newLedger(t, i.ResourceSlices(testOptions))
	type named struct {
		shape PartitionShape
		name  string
	}
	var every []named
	nameByPlace := map[string]string{}
	key := func(s PartitionShape) string { return fmt.Sprint(s.Profile.ID, s.Placement) }
	for _, s := range (&hardware{mig: g.MIG}).every() {
		every = append(every, named{s, nameOf(t, i, s)})
		nameByPlace[key(s)] = nameOf(t, i, s)
	}
	visitLegal(g.MIG, func(layout []PartitionShape) {
		layouts++
		var held []string
		for _, s := range layout {
			held = append(held, nameByPlace[key(s)])
		}
		if !ledger.fits(held...) {
			t.Errorf("legal, but the counters refuse it: %v", held)
		}
		h := &hardware{mig: g.MIG, instances: layout}
		for _, more := range every {
			if slices.Contains(held, more.name) {
				continue // a device is allocated once, whatever the counters say
			}
			if got, want := ledger.fits(append(held, more.name)...), h.allows(more.shape); got != want {
				t.Errorf("counters say %t, hardware says %t: %s beside %v", got, want, more.name, held)
			}
		}
		if g.MIG.Dynamic {
			whole := GPUName(g.PCIAddress)
			if got, want := ledger.fits(append(held, whole)...), len(held) == 0; got != want {
				t.Errorf("the whole GPU beside %v: counters say %t", held, got)
			}
		}
	})
	return layouts
}

func TestCountersAgainstHardware(t *testing.T) {
	for _, b := range partitionable(t) {
		t.Run(b.name, func(t *testing.T) {
			t.Logf("%d layouts", compareWithHardware(t, b.node))
		})
	}
}

// TestCountersOfUnknownBoards does the same with boards that do not exist.
// Nothing in this package may depend on the boards there are.
func TestCountersOfUnknownBoards(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for n := range 150 {
		slices := 2 + random.IntN(4)
		mig := &gpu.MIG{Dynamic: true, MemorySlices: slices, Profiles: []gpu.Profile{{
			ID: 0, Name: "9g.9gb", Slices: 9, MaxInstances: 1, Placements: []gpu.Placement{{Size: slices}},
			Resources: gpu.Resources{
				MemoryBytes: random.Uint64N(100), Decoders: random.IntN(5), Encoders: random.IntN(3), JPEGEngines: random.IntN(3), OFAEngines: random.IntN(2),
			},
		}}}
		for id := range 1 + random.IntN(3) {
			size := 1 + random.IntN(min(slices, 3))
			p := gpu.Profile{
				ID: uint32(id + 1), Name: fmt.Sprintf("%dg.%dgb", size, id+1), MaxInstances: 1 + random.IntN(slices),
				// Often all that fit have more memory together than the GPU says it has.
				Resources: gpu.Resources{
					MemoryBytes: random.Uint64N(60), Decoders: random.IntN(4), Encoders: random.IntN(3), JPEGEngines: random.IntN(2), OFAEngines: random.IntN(2),
				},
			}
			for start := 0; start+size <= slices; start += 1 + random.IntN(size) {
				p.Placements = append(p.Placements, gpu.Placement{Start: start, Size: size})
			}
			mig.Profiles = append(mig.Profiles, p)
		}
		compareWithHardware(t, &gpu.Node{DriverVersion: "1.2.3", GPUs: []gpu.GPU{{
			PCIAddress: "0000:01:00.0", MIG: mig, Resources: gpu.Resources{MemoryBytes: random.Uint64N(100)},
		}}})
		if t.Failed() {
			t.Fatalf("board %d: %+v", n, *mig)
		}
	}
}

// TestCounterNames shows which limits need a counter of their own, and that
// there are no more. Those of all boards are in testdata.
func TestCounterNames(t *testing.T) {
	made := map[string]struct {
		profiles []gpu.Profile
		want     []string
	}{
		"disjoint placements are enough": {
			[]gpu.Profile{profileOf(1, "1g.1gb", 1, 4, 1, gpu.Resources{Decoders: 1}), profileOf(2, "4g.4gb", 4, 1, 4, gpu.Resources{Decoders: 4})}, nil},
		"instances of one profile": {
			[]gpu.Profile{profileOf(1, "1g.1gb", 1, 2, 1, gpu.Resources{}), profileOf(2, "4g.4gb", 4, 1, 4, gpu.Resources{})},
			[]string{"instances-1g1gb"}},
		"instances of two profiles, each for itself": {
			[]gpu.Profile{profileOf(1, "1g.1gb", 1, 2, 1, gpu.Resources{}), profileOf(2, "1g.1gb+me", 1, 1, 1, gpu.Resources{}),
				profileOf(3, "4g.4gb", 4, 1, 4, gpu.Resources{})},
			[]string{"instances-1g1gb", "instances-1g1gb-me"}},
		"compute slices": {
			[]gpu.Profile{profileOf(1, "1g.1gb", 1, 4, 1, gpu.Resources{}), profileOf(2, "3g.4gb", 3, 1, 4, gpu.Resources{})},
			[]string{"compute-slices"}},
		"multiprocessors and copy engines": {
			[]gpu.Profile{
				profileOf(1, "1g.1gb", 1, 4, 1, gpu.Resources{Multiprocessors: 20, CopyEngines: 1}),
				profileOf(2, "1g.1gb+me", 1, 4, 1, gpu.Resources{Multiprocessors: 10, CopyEngines: 2}),
				profileOf(3, "4g.4gb", 4, 1, 4, gpu.Resources{Multiprocessors: 70, CopyEngines: 6})},
			[]string{"copy-engines", "multiprocessors"}},
		"the stricter of two": { // twice as many OFA engines for the same partitions
			[]gpu.Profile{
				profileOf(1, "1g.1gb", 1, 4, 1, gpu.Resources{JPEGEngines: 1, OFAEngines: 1}),
				profileOf(2, "4g.4gb", 4, 1, 4, gpu.Resources{JPEGEngines: 3, OFAEngines: 2})},
			[]string{"ofa-engines"}},
		"no limit told": {
			[]gpu.Profile{profileOf(1, "1g.1gb", 1, 0, 1, gpu.Resources{}), profileOf(2, "4g.4gb", 4, 0, 4, gpu.Resources{})}, nil},
	}
	for name, tc := range made {
		node := &gpu.Node{GPUs: []gpu.GPU{{PCIAddress: "0000:01:00.0", MIG: &gpu.MIG{Dynamic: true, MemorySlices: 4, Profiles: tc.profiles}}}}
		expect.Same(t, furtherCounters(mustInventory(t, node)), tc.want, name+": counters beside memory slices")
	}
}

// TestMemorySliceCounters: a memory slice has a counter only where that decides
// anything. That the counters allow the same as the hardware all the same is what
// TestCountersAgainstHardware goes through.
func TestMemorySliceCounters(t *testing.T) {
	shape := func(start, size int) PartitionShape {
		return PartitionShape{Placement: gpu.Placement{Start: start, Size: size}}
	}
	made := map[string]struct {
		slices int
		shapes []PartitionShape
		want   []int
	}{
		"one slice":                {1, []PartitionShape{shape(0, 1)}, []int{0}},
		"never apart":              {4, []PartitionShape{shape(0, 4), shape(0, 2), shape(2, 2)}, []int{0, 2}},
		"an overlap in the middle": {3, []PartitionShape{shape(0, 2), shape(1, 2)}, []int{1}},
		"slices nobody uses":       {6, []PartitionShape{shape(1, 1), shape(2, 2)}, []int{1, 2}},
		"a chain":                  {4, []PartitionShape{shape(0, 1), shape(0, 2), shape(0, 3), shape(0, 4)}, []int{0}},
	}
	for name, tc := range made {
		if got := decisiveSlices(tc.slices, tc.shapes); !slices.Equal(got, tc.want) {
			t.Errorf("%s: memory slices %v, want %v", name, got, tc.want)
		}
	}
}

// profileOf fits everywhere on a GPU with four memory slices.
func profileOf(id uint32, name string, slices, most, size int, r gpu.Resources) gpu.Profile {
	p := gpu.Profile{ID: id, Name: name, Slices: slices, MaxInstances: most, Resources: r}
	for start := 0; start+size <= 4; start += size {
		p.Placements = append(p.Placements, gpu.Placement{Start: start, Size: size})
	}
	return p
}

func furtherCounters(i *Inventory) []string {
	var names []string
	for _, object := range i.ResourceSlices(testOptions) {
		for _, set := range object.Spec.SharedCounters {
			for name := range set.Counters {
				if !strings.HasPrefix(name, "memory-slice-") {
					names = append(names, name)
				}
			}
		}
	}
	slices.Sort(names)
	return names
}
