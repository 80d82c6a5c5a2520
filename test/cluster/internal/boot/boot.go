// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package boot is the first process of a node: it makes its namespaces into a node, starts the programs, and then keeps them running.
package boot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/cgroup"
	"github.com/partage-dev/partage/test/cluster/internal/controlplane"
	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/machine"
	"github.com/partage-dev/partage/test/cluster/internal/pki"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
	"github.com/partage-dev/partage/test/cluster/internal/service"
)

// Plan is what the caller asks for.
type Plan struct {
	Root          string           `json:"root"`    // of the checkout
	Cluster       string           `json:"cluster"` // its name
	Node          string           `json:"node"`
	Address       netip.Prefix     `json:"address"` // of the node, with its network
	Pods          netip.Prefix     `json:"pods"`
	Machine       *machine.Machine `json:"machine,omitempty"`
	Groups        cgroup.Groups    `json:"groups"`
	Images        []string         `json:"images"`
	FeatureGates  string           `json:"featureGates,omitempty"`
	RuntimeConfig string           `json:"runtimeConfig,omitempty"`
	SyncFrequency string           `json:"syncFrequency,omitempty"` // of the kubelet
}

// Event is one line of what the first process reports.
type Event struct {
	Note  string `json:"note,omitempty"`
	Ready bool   `json:"ready,omitempty"`
	Error string `json:"error,omitempty"`
	Log   string `json:"log,omitempty"` // where the reason of the error may be
}

// Path is what programs of the node get as PATH.
func Path(c layout.Cluster) string {
	return c.Bin() + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}

// Init runs as the node's PID 1. When it returns, the kernel ends every process of the node.
func Init(planFile string) error {
	events := json.NewEncoder(os.NewFile(sandbox.EventsFD, "events"))
	err := initialize(planFile, events)
	if err != nil {
		// Nobody may be listening any more; main prints the error to the log as well.
		_ = events.Encode(Event{Error: err.Error(), Log: service.LogOf(err)})
	}
	return err
}

func initialize(planFile string, events *json.Encoder) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	sandbox.WatchCaller(func() { cancel(errors.New("the command that started the node has ended")) })
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)

	b, err := os.ReadFile(planFile)
	if err != nil {
		return fmt.Errorf("read the node's plan: %w", err)
	}
	var plan Plan
	if err := json.Unmarshal(b, &plan); err != nil {
		return fmt.Errorf("read the node's plan: %w", err)
	}
	files, err := layout.Repo{Root: plan.Root}.Cluster(plan.Cluster)
	if err != nil {
		return err
	}
	if err := sandbox.Setup(sandbox.Spec{
		Hostname: plan.Node, Scratch: filepath.Join(files.Run(), "disk"), Groups: plan.Groups,
		Network: sandbox.Network{Node: plan.Address, API: controlplane.ServiceAddress, Services: controlplane.ServiceNet},
	}); err != nil {
		return err
	}
	sup := service.New([]string{"PATH=" + Path(files), "HOME=/root", "LANG=C.UTF-8"}, files.Services())
	go sup.Reap(ctx, children)
	n := newPower(ctx, plan, files, sup)
	started := make(chan error, 1)
	go func() { started <- start(ctx, plan, files, sup, n, events) }()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case err = <-sup.Failed():
		return err
	case err = <-started:
		if err != nil {
			return err
		}
	}
	sup.Steady()
	if err := n.listen(); err != nil {
		return err
	}
	if err := events.Encode(Event{Ready: true}); err != nil {
		return fmt.Errorf("report that the node is ready: %w", err)
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// start brings control plane and node up side by side: each spends its time waiting for its own slow program.
func start(ctx context.Context, plan Plan, files layout.Cluster, sup *service.Supervisor, p *power, events *json.Encoder) error {
	notes := make(chan string)
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		for n := range notes {
			_ = events.Encode(Event{Note: n})
		}
	}()
	report := func(format string, args ...any) { notes <- fmt.Sprintf(format, args...) }
	defer func() { close(notes); <-printed }()

	c := controlplane.ControlPlane{
		Address: plan.Address.Addr(), PKI: files.PKI(), Data: filepath.Join(files.Run(), "control-plane"), Log: files.Log,
		FeatureGates: plan.FeatureGates, RuntimeConfig: plan.RuntimeConfig,
	}
	if err := os.MkdirAll(c.Data, 0o700); err != nil {
		return fmt.Errorf("make the control plane's folder: %w", err)
	}
	authority, err := pki.New(files.PKI())
	if err != nil {
		return err
	}
	if err := errors.Join(c.Keys(authority, files.Kubeconfig()), p.node.Keys(authority)); err != nil {
		return err
	}
	group := errgroup.Group{} // without a context of its own: services live on after it
	group.Go(func() error { return c.Start(ctx, sup, report) })
	group.Go(func() error { return p.on(report) }) //nolint:contextcheck // it has the one of the first process
	if err := group.Wait(); err != nil {
		return err
	}
	return p.node.Ready(ctx)
}
