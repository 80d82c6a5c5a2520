// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
)

// linked reports whether two GPUs of a node reach each other over NVLink.
func linked(a, b *gpu.GPU) bool {
	switch {
	case a.NVLink == nil || b.NVLink == nil:
		return false
	case a.NVLink.Clique != "" || b.NVLink.Clique != "":
		return a.NVLink.Clique == b.NVLink.Clique
	}
	return slices.Contains(a.NVLink.GPUs, b.PCIAddress) || slices.Contains(b.NVLink.GPUs, a.PCIAddress) ||
		slices.ContainsFunc(a.NVLink.Switches, func(s string) bool { return slices.Contains(b.NVLink.Switches, s) })
}

// Groups are the groups of GPUs that are close together to which a GPU belongs.
type Groups struct {
	// NVLinkDomain is the same for all GPUs of the node that reach each other over NVLink: the clique of a fabric that
	// spans nodes, or else the UUID of one of them. Empty for a GPU that reaches no other.
	NVLinkDomain string
	// PCIeSwitch is the PCI address of the upstream port of the PCIe switch that the GPU shares with another one.
	PCIeSwitch string
}

// GroupsOf returns the groups of the node's GPUs by PCI address. GPUs that are in none are missing.
//
// In an NVLink domain every GPU reaches every other. Links that do not divide the GPUs into such
// domains, as the cube of a DGX-1, make none: two GPUs of it may or may not be neighbours.
func GroupsOf(n *gpu.Node) map[string]Groups {
	reached := map[string]string{} // their addresses, by address
	behind := map[string]int{}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		behind[g.PCIeSwitch]++
		reached[g.PCIAddress] = strings.Join(reachedFrom(n, g), " ")
	}
	groups := map[string]Groups{}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		group := Groups{NVLinkDomain: nvlinkDomain(n, g, reached)}
		if behind[g.PCIeSwitch] > 1 {
			group.PCIeSwitch = g.PCIeSwitch
		}
		if group != (Groups{}) {
			groups[g.PCIAddress] = group
		}
	}
	return groups
}

// nvlinkDomain returns the domain that a GPU is in, or "": one whose GPUs all reach the same ones.
func nvlinkDomain(n *gpu.Node, g *gpu.GPU, reached map[string]string) string {
	members := strings.Fields(reached[g.PCIAddress])
	for _, member := range members {
		if reached[member] != reached[g.PCIAddress] {
			return ""
		}
	}
	switch {
	case len(members) == 0 || len(members) == 1 && g.NVLink.Clique == "":
		return ""
	case g.NVLink.Clique != "":
		return g.NVLink.Clique
	}
	return n.GPUs[slices.IndexFunc(n.GPUs, func(other gpu.GPU) bool { return other.PCIAddress == members[0] })].UUID
}

// reachedFrom returns the addresses of the GPUs that a GPU reaches over NVLink, in order, with its own. One without
// a UUID is no longer where it was.
func reachedFrom(n *gpu.Node, g *gpu.GPU) (reached []string) {
	if g.NVLink == nil || g.UUID == "" {
		return nil
	}
	for i := range n.GPUs {
		if other := &n.GPUs[i]; other == g || other.UUID != "" && linked(g, other) {
			reached = append(reached, other.PCIAddress)
		}
	}
	return gpu.SortPCIAddresses(reached)
}
