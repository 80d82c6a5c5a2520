// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package boot

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/partage-dev/partage/test/cluster/internal/cgroup"
	"github.com/partage-dev/partage/test/cluster/internal/controlplane"
	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/machine"
	"github.com/partage-dev/partage/test/cluster/internal/node"
	"github.com/partage-dev/partage/test/cluster/internal/pki"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
)

// Plan is what the caller asks of all nodes' first processes.
type Plan struct {
	Root          string       `json:"root"`    // of the checkout
	Cluster       string       `json:"cluster"` // its name
	Network       netip.Prefix `json:"network"` // of the nodes
	Nodes         []Node       `json:"nodes"`   // the control plane runs on the first
	Images        []string     `json:"images"`
	Kubernetes    string       `json:"kubernetes,omitempty"` // its version, unless the usual one
	Kubelet       string       `json:"kubelet,omitempty"`    // version of the kubelets, unless the same
	FeatureGates  string       `json:"featureGates,omitempty"`
	RuntimeConfig string       `json:"runtimeConfig,omitempty"`
	SyncFrequency string       `json:"syncFrequency,omitempty"` // of the kubelets
	NodeGrace     string       `json:"nodeGrace,omitempty"`     // after which a silent node is lost
}

// Node is one node of a plan.
type Node struct {
	sandbox.Host

	Machine *machine.Machine `json:"machine,omitempty"`
	Groups  cgroup.Groups    `json:"groups"`
}

// Write makes the keys and folders that the plan's nodes need, and the file that they read.
func (p Plan) Write() error {
	files, err := p.files()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(files.ControlPlane(), 0o700); err != nil {
		return fmt.Errorf("make the control plane's folder: %w", err)
	}
	authority, err := pki.New(files.PKI())
	if err != nil {
		return err
	}
	if err := p.controlPlane(files).Keys(authority, files.Kubeconfig()); err != nil {
		return err
	}
	for _, n := range p.Nodes {
		own := files.Node(n.Name)
		if err := errors.Join(os.MkdirAll(own.Run(), 0o755), os.MkdirAll(own.Logs(), 0o755)); err != nil {
			return fmt.Errorf("make the folders of node %s: %w", n.Name, err)
		}
		if err := p.kubeNode(files, n).Keys(authority); err != nil {
			return err
		}
	}
	b, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the nodes' plan: %w", err)
	}
	if err := os.WriteFile(files.Plan(), b, 0o600); err != nil {
		return fmt.Errorf("write the nodes' plan: %w", err)
	}
	return nil
}

func readPlan(file string) (Plan, error) {
	var p Plan
	b, err := os.ReadFile(file)
	if err != nil {
		return p, fmt.Errorf("read the nodes' plan: %w", err)
	}
	if err := json.Unmarshal(b, &p); err != nil {
		return p, fmt.Errorf("read the nodes' plan: %w", err)
	}
	return p, nil
}

func (p Plan) files() (layout.Cluster, error) { return layout.Repo{Root: p.Root}.Cluster(p.Cluster) }

func (p Plan) node(name string) (Node, error) {
	i := slices.IndexFunc(p.Nodes, func(n Node) bool { return n.Name == name })
	if i < 0 {
		return Node{}, fmt.Errorf("the plan of cluster %s has no node %s", p.Cluster, name)
	}
	return p.Nodes[i], nil
}

func (p Plan) network(self Node) sandbox.Network {
	network := sandbox.Network{
		Nodes: p.Network, Self: self.Host,
		API: controlplane.ServiceAddress, Server: p.Nodes[0].Address, Services: controlplane.ServiceNet,
	}
	for _, n := range p.Nodes {
		if n.Name != self.Name {
			network.Peers = append(network.Peers, n.Host)
		}
	}
	return network
}

func (p Plan) controlPlane(files layout.Cluster) controlplane.ControlPlane {
	return controlplane.ControlPlane{
		Address: p.Nodes[0].Address, PKI: files.PKI(), Data: files.ControlPlane(), Log: files.Log,
		FeatureGates: p.FeatureGates, RuntimeConfig: p.RuntimeConfig, NodeGrace: p.NodeGrace,
	}
}

func (p Plan) kubeNode(files layout.Cluster, n Node) node.Node {
	own := files.Node(n.Name)
	program := ""
	if p.Kubelet != "" {
		program = files.Kubernetes(p.Kubelet)
	}
	return node.Node{
		KubeletBin: program,
		Name:       n.Name, Address: n.Address, Pods: n.Pods, API: p.Nodes[0].Address, DNS: controlplane.DNSAddress, Machine: n.Machine,
		PKI: files.PKI(), Config: own.Run(), Bin: files.Bin(), CNI: files.CNI(), Images: p.Images, Log: own.Log,
		FeatureGates: p.FeatureGates, SyncFrequency: p.SyncFrequency,
	}
}
