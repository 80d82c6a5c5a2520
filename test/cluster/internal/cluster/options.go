// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
)

// Options are what a user chooses.
type Options struct {
	Nodes         []Node `json:"nodes"`
	Kubernetes    string `json:"kubernetes,omitempty"` // its version, unless the usual one
	Kubelet       string `json:"kubelet,omitempty"`    // version of the kubelets, unless the same
	FeatureGates  string `json:"featureGates,omitempty"`
	RuntimeConfig string `json:"runtimeConfig,omitempty"`
	SyncFrequency string `json:"syncFrequency,omitempty"`
	NodeGrace     string `json:"nodeGrace,omitempty"`
}

// Node is what a user chooses of one node.
type Node struct {
	Name    string `json:"name"`
	Machine string `json:"machine,omitempty"` // empty: no GPUs
}

// The clusters' own networks; nothing outside a cluster sees them, so every cluster may use the same.
var (
	nodeNetwork = netip.MustParsePrefix("10.91.0.0/24")
	podNetwork  = netip.MustParsePrefix("10.92.0.0/16")
)

// maxNodes bounds what a typing error can do to the machine; there are addresses for 254.
const maxNodes = 32

// nodeRE leaves room in the names of control groups and folders.
var nodeRE = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$`)

// ParseNodes reads NAME[=MACHINE],...
func ParseNodes(text string) ([]Node, error) {
	var nodes []Node
	for entry := range strings.SplitSeq(text, ",") {
		name, machine, given := strings.Cut(entry, "=")
		switch {
		case !nodeRE.MatchString(name):
			return nil, fmt.Errorf("node %q: want NAME or NAME=MACHINE, with a name of up to 32 of a-z, 0-9 and -", entry)
		case given && machine == "":
			return nil, fmt.Errorf("node %q: no machine after =", entry)
		case slices.ContainsFunc(nodes, func(n Node) bool { return n.Name == name }):
			return nil, fmt.Errorf("two nodes have the name %s", name)
		case len(nodes) == maxNodes:
			return nil, fmt.Errorf("more than %d nodes", maxNodes)
		}
		nodes = append(nodes, Node{Name: name, Machine: machine})
	}
	return nodes, nil
}

// Names returns the names of nodes, for messages.
func Names(nodes []Node) string {
	var names []string
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	return strings.Join(names, ", ")
}

// host returns a node with the addresses that it has by its place among the nodes.
func host(name string, place int) sandbox.Host {
	address, pods := nodeNetwork.Addr().As4(), podNetwork.Addr().As4()
	address[3] = byte(place + 1)
	pods[2] = byte(place)
	return sandbox.Host{Name: name, Address: netip.AddrFrom4(address), Pods: netip.PrefixFrom(netip.AddrFrom4(pods), 24)}
}

// String implements fmt.Stringer.
func (n Node) String() string {
	if n.Machine == "" {
		return "node " + n.Name + ", no machine"
	}
	return "node " + n.Name + ", machine " + n.Machine
}

// String implements fmt.Stringer.
func (o Options) String() string {
	var parts []string
	for _, n := range o.Nodes {
		parts = append(parts, n.String())
	}
	for _, part := range []struct{ what, value string }{
		{"Kubernetes", o.Kubernetes}, {"kubelets", o.Kubelet}, {"feature gates", o.FeatureGates}, {"runtime config", o.RuntimeConfig},
		{"sync frequency", o.SyncFrequency}, {"node grace", o.NodeGrace},
	} {
		if part.value != "" {
			parts = append(parts, part.what+" "+part.value)
		}
	}
	return strings.Join(parts, ", ")
}
