// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"math"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// Summary is what an inventory says of one GPU.
type Summary struct {
	// GPU must not be changed.
	GPU           *gpu.GPU
	DriverVersion string
	// Devices are in published order, without the observer.
	Devices []Device
	// Tainted has the names of those that must not be allocated.
	Tainted map[string]bool
	// AllocatableBytes is how much of the GPU's memory claims can have at the same time, at
	// most: the best choice of devices that exclude each other.
	AllocatableBytes uint64
}

// Summaries returns what the inventory says of each GPU, in order of the PCI addresses.
func (i *Inventory) Summaries() []Summary {
	all := make([]Summary, 0, len(i.boards))
	for _, b := range i.boards {
		s := Summary{
			GPU: b.gpu, DriverVersion: b.node.DriverVersion, Devices: b.all(), Tainted: map[string]bool{}, AllocatableBytes: b.allocatable(),
		}
		for name, taints := range b.taints {
			s.Tainted[name] = slices.ContainsFunc(taints, func(t taint) bool { return t.effect != policy.EffectNone })
		}
		all = append(all, s)
	}
	return all
}

// GPU returns the GPU with a PCI address, or nil.
func (i *Inventory) GPU(pciAddress string) *gpu.GPU {
	for b := range i.boards {
		if g := i.boards[b].gpu; g.PCIAddress == pciAddress {
			return g
		}
	}
	return nil
}

// PCIAddresses are those of all GPUs, in order.
func (i *Inventory) PCIAddresses() []string {
	var addresses []string
	for _, b := range i.boards {
		addresses = append(addresses, b.gpu.PCIAddress)
	}
	return addresses
}

// allocatable is the largest legal option that is published. Taints do not count: what a
// broken GPU could offer is still what it was bought for.
func (b board) allocatable() uint64 {
	var best uint64
	options := map[int][]option{}
	for _, d := range b.devices {
		memory := d.GPU.Resources.MemoryBytes
		if d.Partition != nil {
			memory = d.Partition.Profile.Resources.MemoryBytes
		}
		if d.Share != nil {
			// With overcommitment claims can ask for more than there is.
			memory = min(memory, uint64(max(0, d.Share.MemoryBytes)))
		}
		if d.Partition == nil {
			best = max(best, memory)
			continue
		}
		start := d.Partition.Placement.Start
		options[start] = append(options[start], option{*d.Partition, memory})
	}
	if len(options) > 0 {
		best = max(best, b.bestLayout(options))
	}
	return best
}

// option is a partition and what claims can have of its memory.
type option struct {
	PartitionShape
	memory uint64
}

// bestLayout returns the most memory of partitions that the GPU can hold together, given
// them by their first memory slice.
func (b board) bestLayout(options map[int][]option) uint64 {
	left := make([]int, len(b.counters.limits))
	for n, limit := range b.counters.limits {
		left[n] = limit.total
	}
	known := map[string]uint64{}
	var from func(start int, left []int) uint64
	from = func(start int, left []int) uint64 {
		if start >= b.gpu.MIG.MemorySlices {
			return 0
		}
		key := fmt.Sprint(start, left)
		if most, ok := known[key]; ok {
			return most
		}
		most := from(start+1, left)
		for _, o := range options[start] {
			rest := slices.Clone(left)
			for n, limit := range b.counters.limits {
				rest[n] -= limit.use(o.Profile)
			}
			if o.Placement.Size > 0 && !slices.ContainsFunc(rest, func(n int) bool { return n < 0 }) {
				most = max(most, o.memory+from(start+o.Placement.Size, rest))
			}
		}
		known[key] = most
		return most
	}
	return min(from(0, left), math.MaxInt64)
}
