// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/partage-dev/partage/test/cluster/internal/boot"
	"github.com/partage-dev/partage/test/cluster/internal/cgroup"
	"github.com/partage-dev/partage/test/cluster/internal/image"
	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/machine"
	"github.com/partage-dev/partage/test/cluster/internal/progress"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
	"github.com/partage-dev/partage/test/cluster/internal/service"
	"github.com/partage-dev/partage/test/cluster/internal/toolchain"
)

// GateCommand and InitCommand are the hidden commands of this program that a node begins with; both take the plan's file and the node's name.
const (
	GateCommand = "node-gate"
	InitCommand = "node-init"
)

const (
	cleanLimit = time.Minute
	initLog    = "init" // of a node's first process
	tailLines  = 15
)

// Upper brings clusters up.
type Upper struct {
	Cluster  layout.Cluster
	Options  Options
	Progress *progress.Printer
}

// Up builds what is missing, starts the cluster and returns when its nodes are ready. A cluster that is up already with the same
// options is a success. On an error, or when ctx ends, everything that was started is ended again.
func (u Upper) Up(ctx context.Context) error {
	if err := u.check(); err != nil {
		return err
	}
	unlock, err := lock(u.Cluster)
	if err != nil {
		return err
	}
	defer unlock()
	running, err := u.running()
	if err != nil || running {
		return err
	}
	nodes, err := u.nodes()
	if err != nil {
		return err
	}
	builder := toolchain.Builder{Repo: u.Cluster.Repo, Progress: u.Progress, Kubernetes: []string{u.Options.Kubernetes, u.Options.Kubelet}}
	if err := builder.Build(ctx); err != nil {
		return err
	}
	if err := BuildImages(u.Cluster.Repo, u.Progress, true); err != nil {
		return err
	}
	if err := clean(ctx, u.Cluster); err != nil {
		return fmt.Errorf("clean up after an earlier run: %w", err)
	}
	err = u.start(ctx, nodes)
	if err != nil {
		again, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanLimit)
		defer cancel()
		err = errors.Join(err, clean(again, u.Cluster))
	}
	return err
}

func (u Upper) check() error {
	if err := root(); err != nil {
		return err
	}
	for _, tool := range []string{"mount", "umount"} { // the kubelet calls them
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("a node needs %s (Debian: mount): %w", tool, err)
		}
	}
	return u.Cluster.CheckPlace()
}

// running says whether the cluster is up as asked. Being up in another way is an error.
func (u Upper) running() (bool, error) {
	state, err := Load(u.Cluster)
	if err != nil || state == nil || state.Phase != Up || !state.Alive() {
		return false, err
	}
	if !reflect.DeepEqual(state.Options, u.Options) {
		return false, fmt.Errorf("cluster %s is up already, with other options (%s; asked for %s): run cluster down first",
			u.Cluster.Name, state.Options, u.Options)
	}
	u.Progress.Printf("cluster %s is up already (%s), since %s", u.Cluster.Name, state.Options, state.Since.Format(time.DateTime))
	return true, nil
}

// nodes are those of the plan, without their control groups.
func (u Upper) nodes() ([]boot.Node, error) {
	var nodes []boot.Node
	for i, n := range u.Options.Nodes {
		planned := boot.Node{Host: host(n.Name, i)}
		if n.Machine != "" {
			m, err := machine.Find(n.Machine, filepath.Join(u.Cluster.Products(), "gpusim"), i)
			if err != nil {
				return nil, err
			}
			planned.Machine = &m
		}
		nodes = append(nodes, planned)
	}
	return nodes, nil
}

func (u Upper) start(ctx context.Context, nodes []boot.Node) (err error) {
	if err := errors.Join(os.RemoveAll(u.Cluster.Logs()), os.MkdirAll(u.Cluster.Logs(), 0o755), os.MkdirAll(u.Cluster.Run(), 0o755)); err != nil {
		return fmt.Errorf("make the cluster's folders: %w", err)
	}
	archives, err := filepath.Glob(filepath.Join(u.Cluster.Images(), "*.tar"))
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	for i := range nodes {
		if nodes[i].Groups, err = cgroup.Create(u.Cluster.ID(), nodes[i].Name); err != nil {
			return err
		}
	}
	plan := boot.Plan{
		Root: u.Cluster.Root, Cluster: u.Cluster.Name, Network: nodeNetwork, Nodes: nodes, Images: archives,
		Kubernetes: u.Options.Kubernetes, Kubelet: u.Options.Kubelet, FeatureGates: u.Options.FeatureGates, RuntimeConfig: u.Options.RuntimeConfig,
		SyncFrequency: u.Options.SyncFrequency, NodeGrace: u.Options.NodeGrace,
	}
	if err := plan.Write(); err != nil {
		return err
	}
	u.Progress.Printf("starting cluster %s (%s)", u.Cluster.Name, u.Options)
	var firsts []*sandbox.Process
	defer func() {
		if err != nil {
			err = errors.Join(err, forAll(firsts, (*sandbox.Process).Kill))
		}
	}()
	for _, n := range nodes {
		first, err := u.launch(n)
		if err != nil {
			return err
		}
		firsts = append(firsts, first)
	}
	if err := u.release(ctx, firsts); err != nil {
		return err
	}
	u.Progress.Printf("ready: %s; kubeconfig %s", Names(u.Options.Nodes), u.Cluster.Kubeconfig())
	return nil
}

// launch starts the first process of a node, which waits at its gate.
func (u Upper) launch(n boot.Node) (*sandbox.Process, error) {
	log, err := os.OpenFile(u.Cluster.Node(n.Name).Log(initLog), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644) // for reading
	if err != nil {
		return nil, fmt.Errorf("open the log of node %s: %w", n.Name, err)
	}
	defer log.Close()
	return sandbox.Start(n.Groups, []string{GateCommand, u.Cluster.Plan(), n.Name}, log)
}

// release connects the nodes, opens their gates, and returns when all are ready and outlive this process.
func (u Upper) release(ctx context.Context, firsts []*sandbox.Process) error {
	state := &State{Phase: Starting, Since: time.Now(), Options: u.Options}
	for i, first := range firsts {
		if i > 0 {
			if err := sandbox.Connect(firsts[0], first, i); err != nil {
				return err
			}
		}
		process, err := identify(first.PID)
		if err != nil {
			return err
		}
		state.First = append(state.First, process)
	}
	if err := state.save(u.Cluster); err != nil {
		return err
	}
	if err := forAll(firsts, (*sandbox.Process).Open); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for i, first := range firsts {
		group.Go(func() error { return u.follow(ctx, first, u.Options.Nodes[i].Name) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	state.Phase = Up
	if err := state.save(u.Cluster); err != nil {
		return err
	}
	return forAll(firsts, (*sandbox.Process).Detach)
}

func forAll(firsts []*sandbox.Process, do func(*sandbox.Process) error) error {
	var failed error
	for _, first := range firsts {
		failed = errors.Join(failed, do(first))
	}
	return failed
}

// follow prints what a node's first process reports, until it is ready.
func (u Upper) follow(ctx context.Context, first *sandbox.Process, node string) error {
	stop := context.AfterFunc(ctx, func() { _ = first.Events.Close() })
	defer stop()
	defer first.Events.Close()
	events := json.NewDecoder(first.Events)
	for {
		var e boot.Event
		err := events.Decode(&e)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("bring the cluster up: %w", context.Cause(ctx))
		case errors.Is(err, io.EOF):
			return u.explain(node, "its first process ended without a word", u.Cluster.Node(node).Log(initLog))
		case err != nil:
			return fmt.Errorf("read the reports of node %s: %w", node, err)
		case e.Error != "":
			return u.explain(node, e.Error, e.Log)
		case e.Ready:
			return nil
		default:
			u.Progress.Printf("%s", e.Note)
		}
	}
}

// explain prints the end of the log that says why, if there is one.
func (u Upper) explain(node, message, log string) error {
	if tail := service.Tail(log, tailLines); tail != "" {
		u.Progress.Plain(fmt.Sprintf("--- end of %s\n%s\n---\n", log, tail))
	}
	return fmt.Errorf("node %s: %s", node, message)
}

// BuildImages builds the images of the checkout. With skip, the driver's is only mentioned when its programs are not built, and
// an older archive of it is removed: a cluster is of use without it.
func BuildImages(repo layout.Repo, out *progress.Printer, skip bool) error {
	start := time.Now()
	built := 0
	for _, r := range image.Recipes(repo) {
		err := r.Build()
		switch {
		case errors.Is(err, image.ErrMissing) && skip && r.Ref == image.Plugin:
			out.Printf("skipped: %v", err)
			if err := os.Remove(r.Archive); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("remove an old image: %w", err)
			}
		case err != nil:
			return err
		default:
			built++
		}
	}
	out.Printf("%d images built in %.1fs", built, time.Since(start).Seconds())
	return nil
}
