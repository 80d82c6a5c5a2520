// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package view

import (
	"cmp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/tree"
)

func nodeOf(n *fleet.Node, driver string, u usages) Node {
	out := Node{Name: n.Name, GPUs: []GPU{}}
	for _, p := range n.Problems() {
		out.Notes = append(out.Notes, Badge{Text: p, Title: p + ".", Bad: p != fleet.Cordoned})
	}
	for _, g := range n.GPUs {
		out.GPUs = append(out.GPUs, gpuOf(g, driver, u))
	}
	return out
}

func gpuOf(g *fleet.GPU, driver string, u usages) GPU {
	out := GPU{
		Name: g.Name, Label: g.Label(), UUID: g.UUID, Model: cmp.Or(g.ProductName, "GPU"), PCI: g.PCIBusID,
		Driver: g.DriverVersion, CUDA: g.CUDAVersion, Memory: g.MemoryBytes,
		Slices: max(1, len(g.Cells)),
	}
	out.Notes = notesOf(g, driver)
	out.Bad = slices.ContainsFunc(out.Notes, func(b Badge) bool { return b.Bad })
	out.Blocks = blocksOf(g, driver, u)
	for _, d := range g.Devices {
		if d.Type != fleet.TypeObserver {
			continue
		}
		for _, h := range d.Holdings {
			out.Observers = append(out.Observers, claimKey(h.Claim))
		}
	}
	out.Fits = fitsOf(g)
	if n := len(g.Cells); n > 0 && g.Cells[n-1] != n-1 {
		out.Cells = g.Cells
	}
	out.Use, out.Usage = useOf(out.Blocks), u.ofGPU(g)
	out.Room = out.Use == "part" && !fleet.Free(g).Nothing() && !g.Node.Hidden
	return out
}

func useOf(blocks []Block) string {
	held, free, unknown := false, false, false
	for i := range blocks {
		b := &blocks[i]
		held = held || len(b.Parts) > 0
		unknown = unknown || b.Kind == KindUnknown
		free = free || b.Kind == KindFree || b.Total != nil && shared(b) < b.Total.Shares
	}
	switch {
	case held && (free || unknown):
		return "part"
	case held:
		return "full"
	case unknown:
		return "unknown"
	case free:
		return "free"
	default:
		return "none"
	}
}

func shared(b *Block) int64 {
	var n int64
	for _, p := range b.Parts {
		n += max(1, p.Shares)
	}
	return n
}

// blocksOf cuts the strip of a GPU into blocks: what claims have, partitions that exist without
// a claim, what is blocked, and what is free.
func blocksOf(g *fleet.GPU, driver string, u usages) []Block { //nolint:cyclop // one case for each kind of block
	size := max(1, len(g.Cells))
	var blocks []Block
	taken := make([]bool, size)
	take := func(b Block) {
		b.Start = min(max(0, b.Start), size-1)
		b.Size = min(max(1, b.Size), size-b.Start)
		for i := b.Start; i < b.Start+b.Size; i++ {
			if taken[i] {
				return // two overlap, which no scheduler allows: the first is shown
			}
		}
		for i := b.Start; i < b.Start+b.Size; i++ {
			taken[i] = true
		}
		blocks = append(blocks, b)
	}
	for _, d := range g.Devices {
		if b, held := heldBlock(d, size, u); held {
			take(b)
		}
	}
	for _, d := range g.Devices {
		if d.Type == fleet.TypeMIG && strings.HasSuffix(d.Name, "-static") && len(d.Holdings) == 0 {
			b := Block{Start: 0, Size: size, Kind: KindFree, Device: d.Name, Profile: d.Profile, Why: "A partition that somebody else made. A claim can have it as it is."}
			b.place(d)
			if reasons := refusals(d.Taints, driver); len(reasons) > 0 {
				b.Kind, b.Why = KindBlocked, strings.Join(reasons, ", ")
			}
			take(b)
		}
	}
	for i := range size {
		if taken[i] {
			continue
		}
		index, b := 0, Block{Start: i, Size: 1}
		if len(g.Cells) > 0 {
			index = g.Cells[i]
		}
		switch b.Kind, _ = tree.StateOf(g, index); b.Kind {
		case KindUnknown:
			b.Why = "A claim that you may not read may have it."
		case KindBlocked:
			b.Why = strings.Join(blocking(g, driver, index), ", ")
		}
		take(b)
	}
	slices.SortFunc(blocks, func(a, b Block) int { return cmp.Compare(a.Start, b.Start) })
	return blocks
}

// heldBlock is the block of a device that claims have. An observer has none: it takes nothing.
func heldBlock(d *fleet.Device, size int, u usages) (Block, bool) {
	b := Block{Start: 0, Size: size, Kind: d.Type, Device: d.Name, Profile: d.Profile}
	for _, h := range d.Held() {
		b.Parts = append(b.Parts, Part{Claim: claimKey(h.Claim), Whose: whose(h.Claim.Name, h.Pods), Amount: amountOf(h.Result), Usage: u.of(h)})
	}
	if len(b.Parts) == 0 || d.Type == fleet.TypeObserver {
		return Block{}, false
	}
	b.place(d)
	if d.Shared() {
		b.Total = &Amount{Memory: d.Capacity(fleet.CapacityMemory), SM: d.Capacity(fleet.CapacitySMPercent), Shares: d.Capacity(fleet.CapacityShares)}
	}
	return b, true
}

// place puts a block where a device is: at its cells, if it has not all of the GPU.
func (b *Block) place(d *fleet.Device) {
	if len(d.Placement) == 0 {
		return
	}
	b.Start, b.Size = max(0, slices.Index(d.GPU.Cells, d.Placement[0])), len(d.Placement)
}

func amountOf(r *resourceapi.DeviceRequestAllocationResult) Amount {
	memory, percent, shares := r.ConsumedCapacity[fleet.CapacityMemory], r.ConsumedCapacity[fleet.CapacitySMPercent], r.ConsumedCapacity[fleet.CapacityShares]
	return Amount{Memory: memory.Value(), SM: percent.Value(), Shares: shares.Value()}
}

// blocking says which taints keep the devices that use a slice from being allocated.
func blocking(g *fleet.GPU, driver string, index int) []string {
	var reasons []string
	for _, d := range g.Devices {
		if d.Type == fleet.TypeObserver || len(d.Placement) > 0 && !slices.Contains(d.Placement, index) {
			continue
		}
		for _, r := range refusals(d.Taints, driver) {
			if !slices.Contains(reasons, r) {
				reasons = append(reasons, r)
			}
		}
	}
	return reasons
}

// fitsOf says what a GPU still has room for, each by itself, the largest first.
func fitsOf(g *fleet.GPU) []string {
	room := fleet.Free(g)
	if room.AtMost && !room.Nothing() {
		return []string{"unknown: claims or taint rules that you may not read"}
	}
	slices.SortStableFunc(room.Partitions, func(a, b fleet.PartitionRoom) int {
		return cmp.Or(cmp.Compare(b.MemoryBytes, a.MemoryBytes), cmp.Compare(a.Count, b.Count))
	})
	return tree.Fits(room)
}
