// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/gpu"
)

// counterLayout defines how the devices of one GPU exclude each other: exactly the
// sets of partitions that the GPU can hold at the same time fit into the counters.
type counterLayout struct {
	set string
	// memorySlices are those that have a counter, each of value 1, in ascending order.
	// There are none where the GPU holds no partitions.
	memorySlices []int
	// limits are the further counters, as few as are needed.
	limits []limit
	// memory never refuses partitions that are disjoint: it is there for tools that take quota
	// from a counter of this name, and for devices that fill the GPU. It is nil where the
	// driver does not report the memory.
	memory *limit
	// leastMemory is that of the smallest partition.
	leastMemory int
}

// limit is a resource of a GPU other than memory slices.
type limit struct {
	counter string
	total   int
	use     func(gpu.Profile) int
	// format is how the values are written.
	format resource.Format
}

// memoryCounter has the name and the unit, bytes, that it has in NVIDIA's DRA driver.
const memoryCounter = "memory"

// newCounterLayout finds the counters that the given partitions need: a limit
// gets one if disjoint placements can exceed it and no other limit implies it.
// It fails where the API does not allow as many.
func newCounterLayout(name string, g *gpu.GPU, shapes []PartitionShape) (*counterLayout, error) {
	mig := g.MIG
	// No GPU has this many; a wrong fact must not use up time and memory.
	if mig.MemorySlices > 256 {
		return nil, tooManyCounters(mig.MemorySlices)
	}
	l := &counterLayout{set: name, memorySlices: decisiveSlices(mig.MemorySlices, shapes)}
	if n := len(l.memorySlices); n > resourceapi.ResourceSliceMaxCountersPerCounterSet {
		return nil, tooManyCounters(n)
	}
	var needed []limit
	for _, limit := range limitsOf(name, mig) {
		if maxUse(limit, noLimit, mig.MemorySlices, shapes) > limit.total {
			needed = append(needed, limit)
		}
	}
	for n := range needed {
		if !impliedByAnother(needed, n, mig.MemorySlices, shapes) {
			l.limits = append(l.limits, needed[n])
		}
	}
	l.memory = partitionedMemory(g, shapes)
	if l.memory != nil {
		l.leastMemory = leastUse(*l.memory, shapes)
	}
	if total := len(l.memorySlices) + len(l.further()); total > resourceapi.ResourceSliceMaxCountersPerCounterSet {
		return nil, tooManyCounters(total)
	}
	return l, nil
}

// partitionedMemory is the counter of a GPU's memory. Its total is what the GPU has or,
// if that is more, what any set of disjoint partitions has, so that it refuses none.
func partitionedMemory(g *gpu.GPU, shapes []PartitionShape) *limit {
	l := &limit{
		counter: memoryCounter, format: resource.BinarySI,
		use: func(p gpu.Profile) int { return toBytes(p.Resources.MemoryBytes) },
	}
	l.total = max(toBytes(g.Resources.MemoryBytes), maxUse(*l, noLimit, g.MIG.MemorySlices, shapes))
	if l.total == 0 {
		return nil
	}
	return l
}

func leastUse(l limit, shapes []PartitionShape) int {
	least := l.total
	for _, s := range shapes {
		least = min(least, l.use(s.Profile))
	}
	return least
}

// toBytes converts a size. No GPU has as much as the largest number; a wrong fact must not
// make a sum of sizes negative.
func toBytes(size uint64) int {
	return int(min(size, 1<<50))
}

// decisiveSlices returns the memory slices that need a counter. A slice needs none if
// another one that has a counter is in every placement that it is in: two placements
// which both have the first then also both have the second. On an 8-slice GPU that
// leaves out the last slice, which no placement has without the one before.
func decisiveSlices(memorySlices int, shapes []PartitionShape) []int {
	implies := func(slice, other int) bool {
		return !slices.ContainsFunc(shapes, func(s PartitionShape) bool {
			return contains(s.Placement, slice) && !contains(s.Placement, other)
		})
	}
	var decisive []int
	for slice := range memorySlices {
		implied := false
		for other := range memorySlices {
			// Of two slices that imply each other, the first stays.
			if other != slice && implies(slice, other) && (other < slice || !implies(other, slice)) {
				implied = true
			}
		}
		if !implied {
			decisive = append(decisive, slice)
		}
	}
	return decisive
}

// newUndividedLayout is for a GPU that holds no partitions: each of its devices is
// the whole GPU and draws all of a single counter, so that they exclude each other.
func newUndividedLayout(name string, g *gpu.GPU) *counterLayout {
	only := limit{counter: memoryCounter, total: toBytes(g.Resources.MemoryBytes), use: noLimit.use, format: resource.BinarySI}
	if only.total == 0 {
		only = limit{counter: "gpu", total: 1, use: noLimit.use, format: resource.DecimalSI}
	}
	return &counterLayout{set: name, limits: []limit{only}}
}

func tooManyCounters(n int) error {
	return fmt.Errorf("its memory slices and other limits need %d counters, a counter set holds at most %d",
		n, resourceapi.ResourceSliceMaxCountersPerCounterSet)
}

// limitsOf lists all limits of the hardware other than memory slices. The GPU has
// as many engines of a type as the profile with the most of them.
func limitsOf(gpuName string, mig *gpu.MIG) []limit {
	limits := []limit{
		{counter: "decoders", use: func(p gpu.Profile) int { return p.Resources.Decoders }},
		{counter: "encoders", use: func(p gpu.Profile) int { return p.Resources.Encoders }},
		{counter: "jpeg-engines", use: func(p gpu.Profile) int { return p.Resources.JPEGEngines }},
		{counter: "ofa-engines", use: func(p gpu.Profile) int { return p.Resources.OFAEngines }},
		{counter: "copy-engines", use: func(p gpu.Profile) int { return p.Resources.CopyEngines }},
		{counter: "multiprocessors", use: func(p gpu.Profile) int { return p.Resources.Multiprocessors }},
		{counter: "compute-slices", use: func(p gpu.Profile) int { return p.Slices }},
	}
	for n := range limits {
		use := limits[n].use
		limits[n].format = resource.DecimalSI
		limits[n].use = func(p gpu.Profile) int { return max(0, use(p)) }
		for _, p := range mig.Profiles {
			limits[n].total = max(limits[n].total, limits[n].use(p))
		}
	}
	texts := profileTexts(gpuName, mig)
	for _, p := range mig.Profiles {
		if p.MaxInstances < 1 {
			continue
		}
		id := p.ID
		limits = append(limits, limit{
			counter: "instances-" + texts[id],
			total:   p.MaxInstances,
			use:     func(p gpu.Profile) int { return oneIf(p.ID == id) },
			format:  resource.DecimalSI,
		})
	}
	return limits
}

// maxUse is the most that any set of disjoint placements uses of a limit, among
// those sets that respect another limit. It finds the heaviest packing of intervals
// slice by slice.
func maxUse(l, within limit, memorySlices int, shapes []PartitionShape) int {
	// most[end][spent] is for the first end slices, with at most that much spent of
	// the other limit.
	most := make([][]int, memorySlices+1)
	most[0] = make([]int, within.total+1)
	for end := 1; end <= memorySlices; end++ {
		most[end] = slices.Clone(most[end-1])
		for _, s := range shapes {
			if s.Placement.Start+s.Placement.Size != end {
				continue
			}
			cost, gain := within.use(s.Profile), l.use(s.Profile)
			for spent := cost; spent <= within.total; spent++ {
				most[end][spent] = max(most[end][spent], most[s.Placement.Start][spent-cost]+gain)
			}
		}
	}
	return most[memorySlices][within.total]
}

// noLimit is never exceeded.
var noLimit = limit{use: func(gpu.Profile) int { return 0 }}

// impliedByAnother reports whether limit n holds whenever the memory slices and one
// other limit do. Of two limits that imply each other it keeps the first.
func impliedByAnother(limits []limit, n, memorySlices int, shapes []PartitionShape) bool {
	implies := func(a, b int) bool {
		// No GPU has this many of anything; a wrong fact must not use up memory.
		return limits[a].total <= 10_000 &&
			maxUse(limits[b], limits[a], memorySlices, shapes) <= limits[b].total
	}
	for m := range limits {
		if m != n && implies(m, n) && (m < n || !implies(n, m)) {
			return true
		}
	}
	return false
}

// further returns the counters other than memory slices.
func (l *counterLayout) further() []limit {
	if l.memory == nil {
		return l.limits
	}
	return append(slices.Clone(l.limits), *l.memory)
}

// all returns every counter with its full value: the counter set.
func (l *counterLayout) all() map[string]resourceapi.Counter {
	further := l.further()
	counters := make(map[string]resourceapi.Counter, len(l.memorySlices)+len(further))
	for _, slice := range l.memorySlices {
		counters[memorySliceCounter(slice)] = counter(1, resource.DecimalSI)
	}
	for _, limit := range further {
		counters[limit.counter] = counter(limit.total, limit.format)
	}
	return counters
}

// whole returns what the whole GPU and its shares consume.
func (l *counterLayout) whole() map[string]resourceapi.Counter {
	if l.memory != nil && l.fills(l.memory.total) {
		return l.memoryOnly(l.memory.total)
	}
	return l.all()
}

// of returns what a partition and its shares consume.
func (l *counterLayout) of(s PartitionShape) map[string]resourceapi.Counter {
	if l.memory != nil && l.fills(l.memory.use(s.Profile)) {
		return l.memoryOnly(l.memory.use(s.Profile))
	}
	further := l.further()
	counters := make(map[string]resourceapi.Counter, s.Placement.Size+len(further))
	for _, slice := range l.memorySlices {
		if contains(s.Placement, slice) {
			counters[memorySliceCounter(slice)] = counter(1, resource.DecimalSI)
		}
	}
	for _, limit := range further {
		if use := limit.use(s.Profile); use > 0 {
			counters[limit.counter] = counter(use, limit.format)
		}
	}
	return counters
}

// fills reports whether a device with so much memory leaves too little for any partition. The
// counter of the memory alone then keeps everything else from its GPU.
func (l *counterLayout) fills(memory int) bool {
	return l.leastMemory > 0 && memory+l.leastMemory > l.memory.total
}

func (l *counterLayout) memoryOnly(use int) map[string]resourceapi.Counter {
	return map[string]resourceapi.Counter{l.memory.counter: counter(use, l.memory.format)}
}

func contains(at gpu.Placement, slice int) bool {
	return at.Start <= slice && slice < at.Start+at.Size
}

func memorySliceCounter(n int) string { return "memory-slice-" + strconv.Itoa(n) }

func counter(n int, format resource.Format) resourceapi.Counter {
	return resourceapi.Counter{Value: quantity(int64(n), format)}
}
