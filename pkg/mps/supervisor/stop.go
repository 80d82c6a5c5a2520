// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/process"
)

// stop ends the daemon, its servers, and everything else that they started. Each
// step has its own time limit, and is taken whatever became of the one before.
func (d *daemon) stop(ctx context.Context) error {
	if d.process == nil && d.record.Daemon != nil {
		var err error
		if d.process, err = process.Adopt(*d.record.Daemon, d.unwatched); err != nil {
			return err
		}
	}
	if !d.process.Ended() {
		d.quit(ctx)
	}
	limit := d.options.EndLimit
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("waited for %s", limit))
	defer cancel()
	if err := d.folder.mark().Kill(ctx, d.record.Servers); err != nil {
		return err
	}
	d.process, d.record.Daemon, d.record.Servers, d.record.Sockets = nil, nil, nil, nil
	return nil
}

// quit lets the daemon end its servers and itself. A session that is in use is only
// stopped to be started again, so clients have no more than a second.
func (d *daemon) quit(ctx context.Context) {
	logger, limit := klog.FromContext(ctx), d.options.EndLimit
	client, err := d.client()
	if err == nil {
		alive, cancel := d.while(ctx)
		defer cancel()
		if err = client.Quit(alive); d.process.Ended() {
			return
		}
	}
	// A daemon that quits removes its sockets first, so that nobody can ask it any more.
	quits := err == nil || errors.Is(err, errSockets) && errors.Is(err, os.ErrNotExist)
	if quits && d.process.Wait(ctx, limit) {
		return
	}
	logger.Info("MPS control daemon does not quit, terminating it", "pid", d.process.PID, "reason", err)
	if err := d.process.Signal(unix.SIGTERM); err != nil {
		logger.Error(err, "MPS control daemon cannot be terminated")
	}
	d.process.Wait(ctx, limit/5)
}

// remove stops the session and removes all of it. After an error the next attempt
// finds what is left.
func (d *daemon) remove(ctx context.Context) error {
	d.record.Removing = true
	if d.record.Started {
		// The next supervisor must not start it again. A full disk is no reason to
		// keep it running.
		if err := d.folder.save(d.record); err != nil && !errors.Is(err, os.ErrNotExist) {
			klog.FromContext(ctx).Error(err, "Removing an MPS session without a record of it")
		}
	}
	err := d.stop(ctx)
	if err == nil {
		d.shrink(ctx)
		err = d.folder.unmount(ctx, d.options.EndLimit)
	}
	if err == nil {
		err = d.folder.delete(ctx)
	}
	if err != nil {
		err = fmt.Errorf("remove what is left of session %s: %w", d.folder.id(), err)
		d.publish(mps.Failed, err.Error())
	}
	return err
}

// shrink leaves nothing of the session's /dev/shm to those who have kept it. What they have unlinked and still open keeps no
// session from ending: it is no more than the session could have.
func (d *daemon) shrink(ctx context.Context) {
	if mounted, err := (mount{path: d.folder.shm()}).mounted(); !mounted || err != nil {
		return // unmount says what is wrong
	}
	ctx, cancel := context.WithTimeout(ctx, d.options.EndLimit)
	defer cancel()
	if err := host.ShrinkTmpfs(ctx, d.folder.shm()); err != nil {
		klog.FromContext(ctx).Error(err, "Somebody keeps memory of an MPS session that has ended")
	}
}

// suspend stops the session so that the next supervisor can start it again.
func (d *daemon) suspend(ctx context.Context) error {
	if d.record.Removing || !d.record.Started {
		return d.remove(ctx)
	}
	if err := d.adopt(ctx); err != nil {
		return err
	}
	if err := d.stop(ctx); err != nil {
		return fmt.Errorf("session %s: %w", d.folder.id(), err)
	}
	d.recordLoss(ctx, "the MPS supervisor of the node was stopped, and its daemons with it")
	return errors.Join(d.folder.save(d.record), d.folder.unmount(ctx, d.options.EndLimit))
}
