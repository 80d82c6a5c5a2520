// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"cmp"
	"slices"
)

// Keeping returns the node with those GPUs of an earlier one that it lacks, as the
// earlier one knew them, and the PCI addresses of these GPUs in order. A GPU that
// breaks or falls off the bus must not take devices with it that may be allocated. If the
// GPU is at another address now, what is left at this one has no UUID.
//
// The reserved memory of a GPU is the most that was seen. It is not known while MIG is
// on, and shares of the GPU must not change with the mode, from claim to claim. The same
// holds for what its NVLinks lead to.
//
// The earlier node may be nil. Neither node changes.
func (n *Node) Keeping(earlier *Node) (all *Node, kept []string) {
	all = n.KeepingHidden(earlier)
	for _, g := range cmp.Or(earlier, &Node{}).GPUs {
		if n.Has(g.PCIAddress) {
			continue
		}
		if slices.ContainsFunc(n.GPUs, func(now GPU) bool { return now.UUID == g.UUID }) {
			g.UUID = ""
		}
		all.GPUs = append(all.GPUs, g)
		kept = append(kept, g.PCIAddress)
	}
	slices.SortFunc(all.GPUs, func(a, b GPU) int { return ComparePCIAddresses(a.PCIAddress, b.PCIAddress) })
	return all, SortPCIAddresses(kept)
}

// KeepingHidden returns the node with what MIG mode hides as Keeping has it, and with no
// other GPUs than its own.
func (n *Node) KeepingHidden(earlier *Node) *Node {
	merged := n.Without()
	for _, g := range cmp.Or(earlier, &Node{}).GPUs {
		i := merged.index(g.PCIAddress)
		if i < 0 || merged.GPUs[i].UUID != g.UUID {
			continue
		}
		now := &merged.GPUs[i]
		now.ReservedBytes = max(now.ReservedBytes, g.ReservedBytes)
		if now.NVLink == nil && now.MIG != nil && now.MIG.Enabled {
			now.NVLink = g.NVLink
		}
	}
	return merged
}

// Has reports whether the node has a GPU at this PCI address that is not broken.
func (n *Node) Has(pciAddress string) bool {
	return n.index(pciAddress) >= 0
}

func (n *Node) index(pciAddress string) int {
	return slices.IndexFunc(n.GPUs, func(g GPU) bool { return g.PCIAddress == pciAddress })
}

// Without returns the node without the GPUs at these PCI addresses. The node does not
// change.
func (n *Node) Without(pciAddresses ...string) *Node {
	rest := *n
	rest.GPUs = slices.DeleteFunc(slices.Clone(n.GPUs), func(g GPU) bool { return slices.Contains(pciAddresses, g.PCIAddress) })
	return &rest
}

// SortPCIAddresses sorts PCI addresses in place and returns each once.
func SortPCIAddresses(addresses []string) []string {
	slices.SortFunc(addresses, ComparePCIAddresses)
	return slices.Compact(addresses)
}

// ComparePCIAddresses orders PCI addresses by number: one with a longer PCI domain
// comes later.
func ComparePCIAddresses(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}
