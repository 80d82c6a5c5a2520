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
	most := func(l limit, within ...limit) int {
		return heaviest(mig.MemorySlices, shapes, func(n int) int { return l.use(shapes[n].Profile) }, within...)
	}
	var needed []limit
	for _, limit := range limitsOf(name, mig) {
		if most(limit) > limit.total {
			needed = append(needed, limit)
		}
	}
	// A limit that holds whenever the memory slices and another one do needs no counter.
	for _, n := range decisive(len(needed), func(a, b int) bool {
		// No GPU has this many of anything; a wrong fact must not use up memory.
		return needed[a].total <= 10_000 && most(needed[b], needed[a]) <= needed[b].total
	}) {
		l.limits = append(l.limits, needed[n])
	}
	memory := limit{
		counter: memoryCounter, format: resource.BinarySI,
		use: func(p gpu.Profile) int { return toBytes(p.Resources.MemoryBytes) },
	}
	// Its total is what the GPU has or, if that is more, what any set of disjoint partitions has, so that it refuses none.
	if memory.total = max(toBytes(g.Resources.MemoryBytes), most(memory)); memory.total > 0 {
		l.memory, l.leastMemory = &memory, memory.total
		for _, s := range shapes {
			l.leastMemory = min(l.leastMemory, memory.use(s.Profile))
		}
	}
	if total := len(l.memorySlices) + len(l.further()); total > resourceapi.ResourceSliceMaxCountersPerCounterSet {
		return nil, tooManyCounters(total)
	}
	return l, nil
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
	return decisive(memorySlices, func(other, slice int) bool {
		return !slices.ContainsFunc(shapes, func(s PartitionShape) bool {
			return contains(s.Placement, slice) && !contains(s.Placement, other)
		})
	})
}

// decisive returns those of so many that no other one implies. Of two that imply each other, the first stays.
func decisive(many int, implies func(a, b int) bool) (stay []int) {
	for one := range many {
		implied := false
		for other := range many {
			implied = implied || other != one && implies(other, one) && (other < one || !implies(one, other))
		}
		if !implied {
			stay = append(stay, one)
		}
	}
	return stay
}

// newUndividedLayout is for a GPU that holds no partitions: each of its devices is
// the whole GPU and draws all of a single counter, so that they exclude each other.
func newUndividedLayout(name string, g *gpu.GPU) *counterLayout {
	only := limit{counter: memoryCounter, total: toBytes(g.Resources.MemoryBytes), format: resource.BinarySI, use: func(gpu.Profile) int { return 0 }}
	if only.total == 0 {
		only.counter, only.total, only.format = "gpu", 1, resource.DecimalSI
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

// heaviest is the most that partitions weigh which the GPU can hold together: disjoint placements that respect some
// limits. The weight is that of one of the shapes, by its index.
func heaviest(memorySlices int, shapes []PartitionShape, weight func(n int) int, within ...limit) int {
	type state struct {
		start int
		left  [resourceapi.ResourceSliceMaxCountersPerCounterSet]int // of each limit
	}
	known := map[state]int{}
	var from func(at state) int
	from = func(at state) int {
		if most, ok := known[at]; ok || at.start >= memorySlices {
			return most
		}
		next := at
		next.start++
		most := from(next)
		for n, s := range shapes {
			if s.Placement.Start != at.start {
				continue
			}
			next, fits := at, true
			next.start += s.Placement.Size
			for i, limit := range within {
				next.left[i] -= limit.use(s.Profile)
				fits = fits && next.left[i] >= 0
			}
			if fits {
				most = max(most, weight(n)+from(next))
			}
		}
		known[at] = most
		return most
	}
	var all state
	for i, limit := range within {
		all.left[i] = limit.total
	}
	return from(all)
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
	return l.counters(func(int) bool { return true }, func(of limit) int { return of.total })
}

// counters returns the memory slices and the further counters that something has.
func (l *counterLayout) counters(has func(slice int) bool, use func(limit) int) map[string]resourceapi.Counter {
	counters := map[string]resourceapi.Counter{}
	for _, slice := range l.memorySlices {
		if has(slice) {
			counters[memorySliceCounter(slice)] = counter(1, resource.DecimalSI)
		}
	}
	for _, limit := range l.further() {
		if n := use(limit); n > 0 {
			counters[limit.counter] = counter(n, limit.format)
		}
	}
	return counters
}

// consumed returns what a partition and its shares consume, or the whole GPU and its shares if there is none. A device
// that leaves too little memory for any partition consumes the counter of the memory alone, which keeps everything else
// from its GPU.
func (l *counterLayout) consumed(by *PartitionShape) map[string]resourceapi.Counter {
	use := func(of limit) int {
		if by == nil {
			return of.total
		}
		return of.use(by.Profile)
	}
	if l.leastMemory > 0 && use(*l.memory)+l.leastMemory > l.memory.total {
		return map[string]resourceapi.Counter{l.memory.counter: counter(use(*l.memory), l.memory.format)}
	}
	return l.counters(func(slice int) bool { return by == nil || contains(by.Placement, slice) }, use)
}

func contains(at gpu.Placement, slice int) bool {
	return at.Start <= slice && slice < at.Start+at.Size
}

func memorySliceCounter(n int) string { return "memory-slice-" + strconv.Itoa(n) }

func counter(n int, format resource.Format) resourceapi.Counter {
	return resourceapi.Counter{Value: quantity(int64(n), format)}
}
