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
	room := fleet.Free(g)
	out.Fits = fitsOf(room)
	if n := len(g.Cells); n > 0 && g.Cells[n-1] != n-1 {
		out.Cells = g.Cells
	}
	out.Use, out.Usage = useOf(out.Blocks), u.ofGPU(g)
	out.Room = out.Use == "part" && !room.Nothing() && !g.Node.Hidden
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
func blocksOf(g *fleet.GPU, driver string, u usages) []Block {
	var blocks []Block
	taken := make([]bool, max(1, len(g.Cells)))
	take := func(b Block) {
		cells := taken[b.Start : b.Start+b.Size]
		if slices.Contains(cells, true) {
			return // two overlap, which no scheduler allows: the first is shown
		}
		for i := range cells {
			cells[i] = true
		}
		blocks = append(blocks, b)
	}
	for _, isHeld := range []bool{true, false} {
		for _, d := range g.Devices {
			if b, exists := blockOf(d, driver, u); exists && isHeld == (len(b.Parts) > 0) {
				take(b)
			}
		}
	}
	for i := range taken {
		index, b := 0, Block{Start: i, Size: 1}
		if len(g.Cells) > 0 {
			index = g.Cells[i]
		}
		switch b.Kind, _ = tree.StateOf(g, index); b.Kind {
		case KindUnknown:
			b.Why = hidden
		case KindBlocked:
			b.Why = blocking(g, driver, index)
		}
		take(b)
	}
	slices.SortFunc(blocks, func(a, b Block) int { return cmp.Compare(a.Start, b.Start) })
	return blocks
}

const hidden = "A claim that you may not read may have it."

// blockOf is the block of a device that claims have, or that is a partition which somebody else made: at its cells, if it has not all of the
// GPU. An observer has none: it takes nothing.
func blockOf(d *fleet.Device, driver string, u usages) (b Block, exists bool) {
	b = Block{Size: max(1, len(d.GPU.Cells)), Kind: d.Type, Device: d.Name, Profile: d.Profile}
	if len(d.Placement) > 0 {
		b.Start = max(0, slices.Index(d.GPU.Cells, d.Placement[0]))
		b.Size = min(len(d.Placement), b.Size-b.Start)
	}
	for _, h := range d.Held() {
		b.Parts = append(b.Parts, Part{Claim: claimKey(h.Claim), Whose: whose(h.Claim.Name, h.Pods), Amount: amountOf(h.Result), Usage: u.of(h)})
	}
	switch isStatic := d.Type == fleet.TypeMIG && strings.HasSuffix(d.Name, "-static") && len(d.Holdings) == 0; {
	case d.Type == fleet.TypeObserver, len(b.Parts) == 0 && !isStatic:
		return b, false
	case isStatic:
		b.Kind, b.Why = KindFree, "A partition that somebody else made. A claim can have it as it is."
		if d.GPU.Node.Hidden {
			b.Kind, b.Why = KindUnknown, hidden
		}
		if reasons := refusals(d.Taints, driver); len(reasons) > 0 {
			b.Kind, b.Why = KindBlocked, strings.Join(reasons, ", ")
		}
	case d.Shared():
		b.Total = &Amount{Memory: d.Capacity(fleet.CapacityMemory), SM: d.Capacity(fleet.CapacitySMPercent), Shares: d.Capacity(fleet.CapacityShares)}
		b.AtLeast = d.GPU.Node.AtLeast && shared(&b) < b.Total.Shares
	}
	return b, true
}

func amountOf(r *resourceapi.DeviceRequestAllocationResult) Amount {
	memory, percent, shares := r.ConsumedCapacity[fleet.CapacityMemory], r.ConsumedCapacity[fleet.CapacitySMPercent], r.ConsumedCapacity[fleet.CapacityShares]
	return Amount{Memory: memory.Value(), SM: percent.Value(), Shares: shares.Value()}
}

// blocking says which taints keep the devices that use a slice from being allocated.
func blocking(g *fleet.GPU, driver string, index int) string {
	var reasons []string
	for _, d := range g.Devices {
		if tree.Uses(d, index) {
			reasons = append(reasons, refusals(d.Taints, driver)...)
		}
	}
	slices.Sort(reasons)
	return strings.Join(slices.Compact(reasons), ", ")
}

// fitsOf says what a GPU still has room for, each by itself, the largest first.
func fitsOf(room fleet.Room) []string {
	if room.AtMost && !room.Nothing() {
		return []string{"unknown: claims or taint rules that you may not read"}
	}
	slices.SortStableFunc(room.Partitions, func(a, b fleet.PartitionRoom) int {
		return cmp.Or(cmp.Compare(b.MemoryBytes, a.MemoryBytes), cmp.Compare(a.Count, b.Count))
	})
	return tree.Fits(room)
}
