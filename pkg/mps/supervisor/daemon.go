// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/node/process/keeper"
)

// daemon is the control daemon of a session, whether it runs or not.
type daemon struct {
	options Options
	folder  folder
	// keeper ends with all that the daemon has started. It is nil where none is known.
	keeper *process.Process
	// root is that of the daemon's files, as soon as a command was sent.
	root *os.File
	// ended is told when the keeper ends, and unwatched ends the watching of one that another supervisor has started.
	ended     chan<- struct{}
	unwatched <-chan struct{}
}

// client returns the client of the control daemon.
func (d *daemon) client(r *rules.Record) (control.Client, error) {
	program, err := newControlProgram(d.options.Roots, d.folder)
	switch {
	case err != nil || d.root != nil:
	case r.Daemon == nil:
		err = errors.New("the control daemon has not answered yet")
	default:
		d.root, err = rootOf(*r.Daemon)
	}
	return control.Client{
		Command: func(ctx context.Context) *exec.Cmd { return program.client(ctx, d.root) },
		Check:   func() error { return d.checkSockets(r) },
		Limit:   d.options.CommandLimit,
	}, err
}

// start starts a keeper, which starts the daemon.
func (d *daemon) start(cmd *exec.Cmd) error {
	started, err := process.Start(cmd)
	if err == nil {
		d.watch(started)
	}
	return err
}

func (d *daemon) watch(keeper *process.Process) {
	d.keeper = keeper
	onEnd(keeper, d.unwatched, func() { notify(d.ended) })
}

// adopt finds the keeper that an earlier supervisor has started.
func (d *daemon) adopt(ctx context.Context) error {
	if d.keeper != nil {
		return nil
	}
	id, found, err := keeper.Of(d.folder.keeper())
	if !found || err != nil {
		return err
	}
	adopted, err := process.Adopt(id, d.unwatched)
	if adopted == nil || err != nil {
		return err
	}
	klog.FromContext(ctx).Info("MPS control daemon adopted", "keeper", id.PID)
	d.watch(adopted)
	return nil
}

// end lets the daemon end its servers and itself, and then ends all that is known of it: the lock may have been removed, and a
// keeper that was killed takes the daemon along, but not its servers. Each step has its own time limit, and is taken whatever
// became of the one before.
func (d *daemon) end(ctx context.Context, r *rules.Record) error {
	if !d.keeper.Ended() {
		d.quit(ctx, r)
	}
	limit := d.options.EndLimit
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("waited for %s", limit))
	defer cancel()
	var known []process.ID
	if d.keeper != nil {
		known = append(known, d.keeper.ID)
	}
	if err := keeper.End(ctx, d.folder.keeper(), known...); err != nil {
		return err
	}
	left := r.Servers
	if r.Daemon != nil {
		left = append([]process.ID{*r.Daemon}, left...)
	}
	for _, id := range left {
		if err := id.Kill(ctx); err != nil {
			return err
		}
	}
	if d.keeper = nil; d.root != nil {
		_ = d.root.Close() // it was only read
		d.root = nil
	}
	return nil
}

// quit lets the daemon end its servers and itself. A session that is in use is only
// stopped to be started again, so clients have no more than a second.
func (d *daemon) quit(ctx context.Context, r *rules.Record) {
	client, err := d.client(r)
	if err == nil {
		alive, cancel := d.keeper.Context(ctx, "the control daemon")
		defer cancel()
		if err = client.Quit(alive); d.keeper.Ended() {
			return
		}
	}
	// A daemon that quits removes its sockets first, so that nobody can ask it any more.
	quits := err == nil || errors.Is(err, errSockets) && errors.Is(err, os.ErrNotExist)
	if quits && d.keeper.Wait(ctx, d.options.EndLimit) {
		return
	}
	klog.FromContext(ctx).Info("MPS control daemon does not quit, killing it", "keeper", d.keeper.PID, "reason", err)
}
