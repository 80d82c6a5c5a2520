// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
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
	var best int
	var shapes []PartitionShape
	var memories []int // what claims can have of each
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
			best = max(best, toBytes(memory))
			continue
		}
		shapes, memories = append(shapes, *d.Partition), append(memories, toBytes(memory))
	}
	if len(shapes) > 0 {
		best = max(best, heaviest(b.gpu.MIG.MemorySlices, shapes, func(n int) int { return memories[n] }, b.counters.limits...))
	}
	return uint64(best)
}
