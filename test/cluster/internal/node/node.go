// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package node runs what makes a machine a node: containerd, the images, the simulated GPUs and the kubelet.
package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/partage-dev/partage/test/cluster/internal/controlplane"
	"github.com/partage-dev/partage/test/cluster/internal/kubeapi"
	"github.com/partage-dev/partage/test/cluster/internal/machine"
	"github.com/partage-dev/partage/test/cluster/internal/pki"
	"github.com/partage-dev/partage/test/cluster/internal/poll"
	"github.com/partage-dev/partage/test/cluster/internal/service"
)

const (
	containerd = "containerd"
	kubelet    = "kubelet"
	imports    = "images"
	gpusim     = "gpusim"

	startLimit = 5 * time.Minute
)

// Socket is where containerd answers, in the node.
const Socket = "/run/containerd/containerd.sock"

// Node is one node of a cluster.
type Node struct {
	Name         string
	Address      netip.Addr
	Pods         netip.Prefix // addresses of its pods
	API          netip.Addr   // of the API server
	DNS          netip.Addr   // what pods are told
	Machine      *machine.Machine
	PKI          string
	Config       string // folder for its configuration files
	Bin, CNI     string // programs, network plugins
	KubeletBin   string // folder of the kubelet, unless it is found by PATH
	Images       []string
	Log          func(component string) string
	FeatureGates string
	// SyncFrequency is the kubelet's setting of that name; empty means its default.
	SyncFrequency string
}

// Keys issues the kubelet's certificates. The folders PKI and Config must exist.
func (n Node) Keys(a *pki.Authority) error {
	user := pki.Subject{Name: "system:node:" + n.Name, Groups: []string{"system:nodes"}}
	if err := a.Kubeconfig(n.kubeconfig(), controlplane.Server(n.API), user); err != nil {
		return err
	}
	server := user
	server.DNS = []string{n.Name}
	server.IPs = []netip.Addr{n.Address, netip.MustParseAddr("127.0.0.1")}
	return a.Issue(n.serving(), server)
}

func (n Node) kubeconfig() string { return filepath.Join(n.PKI, "kubelet-"+n.Name+".kubeconfig") }

func (n Node) serving() string { return "kubelet-server-" + n.Name }

// Start starts the node and returns when its kubelet runs; see Ready. Its programs end with ctx.
func (n Node) Start(ctx context.Context, sup *service.Supervisor, report func(string, ...any)) error {
	config, err := n.writeConfig()
	if err != nil {
		return err
	}
	if err := n.startContainerd(ctx, sup, config); err != nil {
		return err
	}
	if n.Machine != nil {
		if err := n.Machine.Create(ctx, sup, n.Log(gpusim)); err != nil {
			return fmt.Errorf("make machine %s: %w", n.Machine.Name, err)
		}
		report("machine %s made in %s", n.Machine.Name, machine.Root)
	}
	if err := n.waitContainerd(ctx, sup); err != nil {
		return err
	}
	for _, archive := range n.Images {
		if err := sup.Run(ctx, service.Spec{Name: "import " + archive, Args: ImportArgs(archive), Log: n.Log(imports)}); err != nil {
			return fmt.Errorf("import image %s: %w", archive, err)
		}
	}
	report("containerd ready, %d images imported", len(n.Images))
	return n.startKubelet(ctx, sup, config)
}

// Reboot starts the node again. Its programs and containers must have ended, see sandbox.PowerOff; disks are as they were.
func (n Node) Reboot(ctx context.Context, sup *service.Supervisor) error {
	config, err := n.writeConfig()
	if err != nil {
		return err
	}
	if n.Machine != nil {
		if err := n.Machine.Reboot(ctx, sup, n.Log(gpusim)); err != nil {
			return fmt.Errorf("reboot machine %s: %w", n.Machine.Name, err)
		}
	}
	if err := n.startContainerd(ctx, sup, config); err != nil {
		return err
	}
	if err := n.waitContainerd(ctx, sup); err != nil {
		return err
	}
	return n.startKubelet(ctx, sup, config)
}

// Running says whether any of the node's programs has not ended.
func Running(sup *service.Supervisor) bool { return sup.Running(containerd) || sup.Running(kubelet) }

func (n Node) startContainerd(ctx context.Context, sup *service.Supervisor, config configFiles) error {
	return sup.Start(ctx, service.Spec{
		Name: containerd, Args: []string{containerd, "--config", config.containerd}, Log: n.Log(containerd),
	})
}

func (n Node) startKubelet(ctx context.Context, sup *service.Supervisor, config configFiles) error {
	args := []string{
		filepath.Join(n.KubeletBin, kubelet), "--config=" + config.kubelet, "--kubeconfig=" + n.kubeconfig(), "--hostname-override=" + n.Name,
		"--node-ip=" + n.Address.String(), "--v=2",
	}
	if n.FeatureGates != "" {
		args = append(args, "--feature-gates="+n.FeatureGates)
	}
	return sup.Start(ctx, service.Spec{Name: kubelet, Args: args, Log: n.Log(kubelet)})
}

// ImportArgs is the command that imports an image archive into the node it runs in.
func ImportArgs(archive string) []string {
	return []string{"ctr", "--address", Socket, "--namespace", "k8s.io", "images", "import", "--local=false", archive}
}

func (n Node) waitContainerd(ctx context.Context, sup *service.Supervisor) error {
	probe := service.Spec{Name: "ctr version", Args: []string{"ctr", "--address", Socket, "version"}, Log: n.Log(imports)}
	err := poll.Until(ctx, startLimit, "containerd to answer", func(ctx context.Context) error {
		if _, err := os.Stat(Socket); err != nil { // ask only when somebody may listen
			return err
		}
		return sup.Run(ctx, probe)
	})
	if err != nil && ctx.Err() == nil {
		return &service.LogError{Log: n.Log(containerd), Err: err}
	}
	return err
}

// Ready waits until the API server says that the node is ready.
func (n Node) Ready(ctx context.Context) error {
	api, err := kubeapi.New(controlplane.Server(n.API), n.PKI, "bootstrap")
	if err != nil {
		return err
	}
	err = poll.Until(ctx, startLimit, "node "+n.Name+" to be ready", func(ctx context.Context) error { return api.NodeReady(ctx, n.Name) })
	if err != nil {
		return &service.LogError{Log: n.Log(kubelet), Err: err}
	}
	return nil
}
