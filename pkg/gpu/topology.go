// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"cmp"
	"slices"
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
	groups := map[string]Groups{}
	for _, domain := range n.nvlinkDomains() {
		name := cmp.Or(domain[0].NVLink.Clique, domain[0].UUID)
		for _, g := range domain {
			groups[g.PCIAddress] = Groups{NVLinkDomain: name}
		}
	}
	behind := map[string]int{}
	for i := range n.GPUs {
		behind[n.GPUs[i].PCIeSwitch]++
	}
	for i := range n.GPUs {
		if g := &n.GPUs[i]; g.PCIeSwitch != "" && behind[g.PCIeSwitch] > 1 {
			groups[g.PCIAddress] = Groups{NVLinkDomain: groups[g.PCIAddress].NVLinkDomain, PCIeSwitch: g.PCIeSwitch}
		}
	}
	return groups
}

// nvlinkDomains returns the GPUs of each domain in the order of their PCI addresses.
func (n *Node) nvlinkDomains() [][]*GPU {
	var rest []*GPU
	for i := range n.GPUs {
		// One without a UUID is no longer where it was.
		if g := &n.GPUs[i]; g.NVLink != nil && g.UUID != "" {
			rest = append(rest, g)
		}
	}
	slices.SortFunc(rest, func(a, b *GPU) int { return ComparePCIAddresses(a.PCIAddress, b.PCIAddress) })
	var domains [][]*GPU
	for len(rest) > 0 {
		var connected []*GPU
		connected, rest = takeConnected(rest)
		alone := len(connected) == 1 && connected[0].NVLink.Clique == ""
		if !alone && eachLinked(connected) {
			domains = append(domains, connected)
		}
	}
	return domains
}

// takeConnected takes the first GPU, and all that are linked to one that is taken, off a list.
func takeConnected(list []*GPU) (connected, rest []*GPU) {
	connected, rest = list[:1:1], list[1:]
	for i := 0; i < len(connected); i++ {
		var others []*GPU
		for _, g := range rest {
			if linked(connected[i], g) {
				connected = append(connected, g)
			} else {
				others = append(others, g)
			}
		}
		rest = others
	}
	slices.SortFunc(connected, func(a, b *GPU) int { return ComparePCIAddresses(a.PCIAddress, b.PCIAddress) })
	return connected, rest
}

func eachLinked(gpus []*GPU) bool {
	for i, a := range gpus {
		for _, b := range gpus[i+1:] {
			if !linked(a, b) {
				return false
			}
		}
	}
	return true
}
