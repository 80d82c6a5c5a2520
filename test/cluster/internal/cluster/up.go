// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

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

// The node's own networks; nothing outside the node sees them, so every cluster may use the same.
var (
	nodeAddress = netip.MustParsePrefix("10.91.0.1/24")
	podNetwork  = netip.MustParsePrefix("10.92.0.0/24")
)

// GateCommand and InitCommand are the hidden commands of this program that a node begins with; both take the plan's file.
const (
	GateCommand = "node-gate"
	InitCommand = "node-init"
)

const (
	cleanLimit = time.Minute
	tailLines  = 15
)

// Upper brings clusters up.
type Upper struct {
	Cluster  layout.Cluster
	Options  Options
	Progress *progress.Printer
}

// Up builds what is missing, starts the cluster and returns when its node is ready. A cluster that is up already with the same
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
	sim, err := u.machine()
	if err != nil {
		return err
	}
	builder := toolchain.Builder{Repo: u.Cluster.Repo, Progress: u.Progress}
	if err := builder.Build(ctx); err != nil {
		return err
	}
	if err := BuildImages(u.Cluster.Repo, u.Progress, true); err != nil {
		return err
	}
	if err := clean(ctx, u.Cluster); err != nil {
		return fmt.Errorf("clean up after an earlier run: %w", err)
	}
	err = u.start(ctx, sim)
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
	if state.Options != u.Options {
		return false, fmt.Errorf("cluster %s is up already, with other options (%s; asked for %s): run cluster down first",
			u.Cluster.Name, state.Options, u.Options)
	}
	u.Progress.Printf("cluster %s is up already (%s), since %s", u.Cluster.Name, state.Options, state.Since.Format(time.DateTime))
	return true, nil
}

// String implements fmt.Stringer.
func (o Options) String() string {
	s := "node " + o.Node + ", no machine"
	if o.Machine != "" {
		s = "node " + o.Node + ", machine " + o.Machine
	}
	if o.FeatureGates != "" {
		s += ", feature gates " + o.FeatureGates
	}
	if o.RuntimeConfig != "" {
		s += ", runtime config " + o.RuntimeConfig
	}
	if o.SyncFrequency != "" {
		s += ", sync frequency " + o.SyncFrequency
	}
	return s
}

func (u Upper) machine() (*machine.Machine, error) {
	if u.Options.Machine == "" {
		return nil, nil //nolint:nilnil // a node without GPUs
	}
	m, err := machine.Find(u.Options.Machine, filepath.Join(u.Cluster.Products(), "gpusim"))
	if err != nil {
		return nil, err
	}
	return &m, nil
}

func (u Upper) start(ctx context.Context, sim *machine.Machine) (err error) {
	if err := errors.Join(os.RemoveAll(u.Cluster.Logs()), os.MkdirAll(u.Cluster.Logs(), 0o755), os.MkdirAll(u.Cluster.Run(), 0o755)); err != nil {
		return fmt.Errorf("make the cluster's folders: %w", err)
	}
	archives, err := filepath.Glob(filepath.Join(u.Cluster.Images(), "*.tar"))
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	groups, err := cgroup.Create(u.Cluster.ID())
	if err != nil {
		return err
	}
	planFile := filepath.Join(u.Cluster.Run(), "plan.json")
	plan, err := json.MarshalIndent(boot.Plan{
		Root: u.Cluster.Root, Cluster: u.Cluster.Name, Node: u.Options.Node, Address: nodeAddress, Pods: podNetwork, Machine: sim,
		Groups: groups, Images: archives, FeatureGates: u.Options.FeatureGates, RuntimeConfig: u.Options.RuntimeConfig,
		SyncFrequency: u.Options.SyncFrequency,
	}, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the node's plan: %w", err)
	}
	if err := os.WriteFile(planFile, plan, 0o600); err != nil {
		return fmt.Errorf("write the node's plan: %w", err)
	}
	log, err := os.OpenFile(u.Cluster.Log("init"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644) // for reading
	if err != nil {
		return fmt.Errorf("open the node's log: %w", err)
	}
	defer log.Close()
	u.Progress.Printf("starting cluster %s (%s)", u.Cluster.Name, u.Options)
	first, err := sandbox.Start(groups, []string{GateCommand, planFile}, log)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, first.Kill())
		}
	}()
	state := &State{Phase: Starting, Since: time.Now(), Options: u.Options}
	if err := errors.Join(state.identify(first.PID), state.save(u.Cluster)); err != nil {
		return err
	}
	if err := u.follow(ctx, first); err != nil {
		return err
	}
	state.Phase = Up
	if err := state.save(u.Cluster); err != nil {
		return err
	}
	if err := first.Detach(); err != nil {
		return err
	}
	u.Progress.Printf("node %s ready; kubeconfig %s", u.Options.Node, u.Cluster.Kubeconfig())
	return nil
}

// follow prints what the node's first process reports, until it is ready.
func (u Upper) follow(ctx context.Context, first *sandbox.Process) error {
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
			return u.explain("the node's first process ended without a word", u.Cluster.Log("init"))
		case err != nil:
			return fmt.Errorf("read the node's reports: %w", err)
		case e.Error != "":
			return u.explain(e.Error, e.Log)
		case e.Ready:
			return nil
		default:
			u.Progress.Printf("%s", e.Note)
		}
	}
}

// explain prints the end of the log that says why, if there is one.
func (u Upper) explain(message, log string) error {
	if log == "" {
		return errors.New(message)
	}
	if tail := service.Tail(log, tailLines); tail != "" {
		u.Progress.Plain(fmt.Sprintf("--- end of %s\n%s\n---\n", log, tail))
	}
	return errors.New(message)
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
