// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package boot is the first process of a node: it makes its namespaces into a node, starts the programs, and then keeps them running.
package boot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
	"github.com/partage-dev/partage/test/cluster/internal/service"
)

// Event is one line of what the first process reports.
type Event struct {
	Note  string `json:"note,omitempty"`
	Ready bool   `json:"ready,omitempty"`
	Error string `json:"error,omitempty"`
	Log   string `json:"log,omitempty"` // where the reason of the error may be
}

// Path is what programs of the node get as PATH. The programs of another version of Kubernetes come before the usual ones.
func Path(c layout.Cluster, kubernetes string) string {
	path := c.Bin() + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	if kubernetes != "" {
		path = c.Kubernetes(kubernetes) + ":" + path
	}
	return path
}

// Init runs as PID 1 of the named node. When it returns, the kernel ends every process of the node.
func Init(planFile, name string) error {
	events := json.NewEncoder(os.NewFile(sandbox.EventsFD, "events"))
	err := initialize(planFile, name, events)
	if err != nil {
		// Nobody may be listening any more; main prints the error to the log as well.
		_ = events.Encode(Event{Error: err.Error(), Log: service.LogOf(err)})
	}
	return err
}

func initialize(planFile, name string, events *json.Encoder) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	sandbox.WatchCaller(func() { cancel(errors.New("the command that started the node has ended")) })
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)

	plan, err := readPlan(planFile)
	if err != nil {
		return err
	}
	self, err := plan.node(name)
	if err != nil {
		return err
	}
	files, err := plan.files()
	if err != nil {
		return err
	}
	own := files.Node(name)
	if err := sandbox.Setup(sandbox.Spec{Scratch: own.Disk(), Groups: self.Groups, Network: plan.network(self)}); err != nil {
		return err
	}
	sup := service.New([]string{"PATH=" + Path(files, plan.Kubernetes), "HOME=/root", "LANG=C.UTF-8"}, own.Services())
	go sup.Reap(ctx, children)
	p := newPower(ctx, plan.kubeNode(files, self), sup)
	started := make(chan error, 1)
	go func() { started <- start(ctx, plan, files, sup, p, events) }()
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
	if err := p.listen(); err != nil {
		return err
	}
	if err := events.Encode(Event{Ready: true}); err != nil {
		return fmt.Errorf("report that the node is ready: %w", err)
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// start brings the node up and, if it is the plan's first, the control plane beside it: each spends its time waiting for its own
// slow program.
func start(ctx context.Context, plan Plan, files layout.Cluster, sup *service.Supervisor, p *power, events *json.Encoder) error {
	notes := make(chan string)
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		for n := range notes {
			_ = events.Encode(Event{Note: n})
		}
	}()
	report := func(format string, args ...any) { notes <- p.node.Name + ": " + fmt.Sprintf(format, args...) }
	defer func() { close(notes); <-printed }()

	group := errgroup.Group{} // without a context of its own: services live on after it
	if p.node.Name == plan.Nodes[0].Name {
		group.Go(func() error { return plan.controlPlane(files).Start(ctx, sup, report) })
	}
	group.Go(func() error { return p.on(report) }) //nolint:contextcheck // it has the one of the first process
	if err := group.Wait(); err != nil {
		return err
	}
	return p.node.Ready(ctx)
}
