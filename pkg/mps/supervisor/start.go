// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/mps/process"
	"github.com/partage-dev/partage/pkg/wait"
)

var errTooSlow = errors.New("it was not ready in time")

// start starts the daemon and its server as the record's spec says. If it fails no
// process is left; the folder and its mounts may be.
func (d *daemon) start(ctx context.Context) error {
	if err := d.startDaemon(ctx); err != nil {
		return err
	}
	if err := d.startFirstServer(ctx); err != nil {
		return errors.Join(fmt.Errorf("%w; %s", err, d.folder.logs().tail()), d.stop(context.WithoutCancel(ctx)))
	}
	return nil
}

// startDaemon starts the control daemon, after the remains of an earlier one are
// gone.
func (d *daemon) startDaemon(ctx context.Context) error {
	program, err := newControlProgram(d.options.Roots, d.folder)
	if err != nil {
		return err
	}
	if err := checkNodes(ctx, d.options.Roots); err != nil {
		return err
	}
	fresh, err := d.folder.make()
	if err != nil {
		return err
	}
	if !d.record.Private {
		// Containers of an earlier version can do with its sockets what they like.
		if err := (mount{path: d.folder.pipe()}).unmount(ctx, time.Now()); err != nil {
			return err
		}
		d.record.Private = true
	}
	// From here on the next supervisor finds everything that follows.
	if err := d.folder.save(d.record); err != nil {
		return err
	}
	if !fresh {
		if err := d.folder.mark().Kill(ctx, d.record.Servers); err != nil {
			return err
		}
	}
	if err := d.memory.mount(d.folder, d.record.Spec); err != nil {
		return err
	}
	if err := d.folder.clearPipe(ctx); err != nil {
		return err
	}
	log, err := d.folder.logs().open()
	if err != nil {
		return err
	}
	cmd := program.daemon(d.record.Spec)
	cmd.Stdout, cmd.Stderr = log, log
	started, err := process.Start(cmd)
	if err = errors.Join(err, log.Close()); err != nil {
		return fmt.Errorf("start the control daemon: %w", err)
	}
	d.process = started
	d.record.Daemon, d.record.Servers, d.record.Sockets = &started.ID, nil, nil
	if err := d.folder.save(d.record); err != nil {
		return errors.Join(err, d.stop(context.WithoutCancel(ctx)))
	}
	return nil
}

// startFirstServer waits for the daemon to answer and starts its server.
func (d *daemon) startFirstServer(ctx context.Context) error {
	ctx, cancel := d.while(ctx)
	defer cancel()
	client, err := d.client()
	if err != nil {
		return err
	}
	if err := d.awaitAnswer(ctx, client); err != nil {
		return fmt.Errorf("the control daemon does not answer: %w", err)
	}
	if err := d.recordSockets(ctx); err != nil {
		return err
	}
	return d.startServer(ctx, client)
}

func (d *daemon) awaitAnswer(ctx context.Context, client control.Client) error {
	var last error
	err := wait.Until(ctx, func() (bool, error) {
		// Before there is a socket the client can only fail.
		if _, last = os.Stat(filepath.Join(d.folder.daemonPipe(), controlSocket)); last == nil {
			_, last = client.Servers(ctx)
		}
		return last == nil, nil
	})
	if err != nil && last != nil {
		return fmt.Errorf("%w: %w", err, last)
	}
	return err
}

// startServer starts a server with the session's limits, waits until it accepts
// clients, and reads the limits back.
func (d *daemon) startServer(ctx context.Context, client control.Client) error {
	// An adopted daemon may never have had them.
	if err := client.SetLimits(ctx, d.record.Spec, 0); err != nil {
		return err
	}
	// Programs that wait for the daemon get a server with these limits. They should not
	// wait for longer: one that finds no daemon runs without limits.
	if err := d.folder.publish(d.options.containerFiles()); err != nil {
		return err
	}
	answer, err := client.WithLimit(d.options.StartLimit).StartServer(ctx)
	if err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	pids, err := d.awaitServer(ctx, client)
	if err != nil {
		return fmt.Errorf("the server does not start: %w%s", err, control.Quote(answer))
	}
	// Before it is ready a server might not answer these queries.
	servers, err := client.Inspect(ctx, pids, d.record.Spec)
	if err == nil && len(servers) == 0 {
		err = fmt.Errorf("it had PID %d and has ended", pids[0])
	}
	if err != nil {
		return fmt.Errorf("the server has started and cannot be used: %w", err)
	}
	return d.accept(ctx, client, servers)
}

// awaitServer waits for a server that accepts clients and returns the daemon's
// servers. The daemon has been told to start one.
func (d *daemon) awaitServer(ctx context.Context, client control.Client) ([]int, error) {
	// Kept for the error: they show how far the server came.
	var pids []int
	var state control.State
	childless := newChildless(d.process.PID)
	err := wait.Until(ctx, func() (bool, error) {
		now, err := client.Servers(ctx)
		if err != nil {
			return false, err
		}
		if len(now) == 0 {
			if len(pids) > 0 {
				return false, fmt.Errorf("it had PID %d and has ended", pids[0])
			}
			return false, childless.check()
		}
		pids = now
		current, err := client.State(ctx, pids[0])
		if err != nil {
			return false, err
		}
		if state = current; state == control.StateFault {
			return false, errors.New("it is faulted although it has had no clients yet")
		}
		return state == control.StateActive, nil
	})
	if err != nil && state != "" {
		err = fmt.Errorf("%w (its state is %s)", err, state)
	}
	return pids, err
}

// noteSharedMemory finds out whether clients need the session's /dev/shm: what drivers have named there before the first
// client comes they look for there. Otherwise no container gets a folder that others can write.
func (d *daemon) noteSharedMemory() error {
	entries, err := os.ReadDir(d.folder.shm())
	if err != nil {
		return fmt.Errorf("look for the server's shared memory: %w", err)
	}
	d.record.SharesMemory = d.record.SharesMemory || len(entries) > 0
	return nil
}

// accept makes these servers the session's, after it corrected their limits where
// necessary.
func (d *daemon) accept(ctx context.Context, client control.Client, servers []control.Server) error {
	ids := make([]process.ID, 0, len(servers))
	for _, server := range servers {
		id, err := process.Identify(server.PID)
		if err != nil {
			return fmt.Errorf("the server has ended: %w", err)
		}
		if !d.owns(id) {
			return fmt.Errorf("the control daemon (%s) calls %s its server, which it did not start", d.record.Daemon, id)
		}
		if err := server.Limits.Check(d.record.Spec); err != nil {
			klog.FromContext(ctx).Info("Setting the limits of an MPS server", "pid", id.PID, "reason", err)
			if err := client.SetLimits(ctx, d.record.Spec, id.PID); err != nil {
				return err
			}
		}
		ids = append(ids, id)
	}
	if !slices.Equal(ids, d.record.Servers) {
		d.forgetClients()
	}
	if err := d.noteSharedMemory(); err != nil {
		return err
	}
	d.record.Servers, d.record.ServerUser = ids, userOf(ids[0].PID)
	d.record.Started, d.record.Serving = true, true
	if err := d.folder.save(d.record); err != nil {
		return err
	}
	d.watchServers()
	d.readySince = time.Now()
	d.noteOpenFiles(ctx)
	d.publish(mps.Running, "")
	return nil
}
