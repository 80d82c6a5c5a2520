// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"slices"
	"strings"
)

// NVLink is what a GPU's active NVLinks lead to. Links say nothing while MIG is on.
type NVLink struct {
	// Clique is "<cluster UUID>.<clique ID>" of a fabric that spans nodes, as in the label
	// nvidia.com/gpu.clique of nodes. Then GPUs and Switches are empty. It is empty where
	// the fabric ends with the node.
	Clique string `json:"clique,omitempty"`
	// GPUs are the PCI addresses of the GPUs to which links lead without a switch, sorted.
	GPUs []string `json:"gpus,omitempty"`
	// Switches are the PCI addresses of NVSwitches, sorted, with UnknownSwitch for those
	// of which the driver does not tell it.
	Switches []string `json:"switches,omitempty"`
}

// UnknownSwitch stands for all NVSwitches of a node whose addresses are not known.
const UnknownSwitch = "unknown"

// linked reports whether two GPUs of a node reach each other over NVLink.
func linked(a, b *GPU) bool {
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

// Groups returns the groups of the node's GPUs by PCI address. GPUs that are in none are missing.
//
// In an NVLink domain every GPU reaches every other. Links that do not divide the GPUs into such
// domains, as the cube of a DGX-1, make none: two GPUs of it may or may not be neighbours.
func (n *Node) Groups() map[string]Groups {
	reached := map[string]string{} // their addresses, by address
	behind := map[string]int{}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		behind[g.PCIeSwitch]++
		reached[g.PCIAddress] = strings.Join(n.reachedFrom(g), " ")
	}
	groups := map[string]Groups{}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		group := Groups{NVLinkDomain: n.nvlinkDomain(g, reached)}
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
func (n *Node) nvlinkDomain(g *GPU, reached map[string]string) string {
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
	return n.GPUs[n.index(members[0])].UUID
}

// reachedFrom returns the addresses of the GPUs that a GPU reaches over NVLink, in order, with its own. One without
// a UUID is no longer where it was.
func (n *Node) reachedFrom(g *GPU) (reached []string) {
	if g.NVLink == nil || g.UUID == "" {
		return nil
	}
	for i := range n.GPUs {
		if other := &n.GPUs[i]; other == g || other.UUID != "" && linked(g, other) {
			reached = append(reached, other.PCIAddress)
		}
	}
	return SortPCIAddresses(reached)
}
