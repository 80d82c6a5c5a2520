// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/mps/process"
)

// daemon is the control daemon of a session with its servers, whether they run or
// not, and the record of both. The session's lock guards it, except for status.
type daemon struct {
	options Options
	memory  *memory
	// fewFiles is the same for all sessions of a node.
	fewFiles *logchange.Problem
	folder   folder
	record   record

	// process is the one of record.Daemon, unless it is known to have ended.
	process *process.Process
	// watched are the servers whose end is reported on serverEnded.
	watched     []process.ID
	serverEnded chan struct{}
	// clients are those of its servers that are watched, by PID. clientKilled says that one was
	// killed.
	clients      map[int]*client
	clientKilled chan struct{}
	// unwatched ends the watching of processes that other supervisors started.
	unwatched <-chan struct{}
	// dialed is the daemon that was found to listen on the sockets of the record.
	dialed process.ID
	// warning is what is wrong with a daemon and servers that run all the same.
	warning string
	// readySince is when clients could connect again the last time.
	readySince time.Time

	status statusBoard
}

// client returns the client of the control daemon.
func (d *daemon) client() (control.Client, error) {
	program, err := newControlProgram(d.options.Roots, d.folder)
	return control.Client{Command: program.client, Limit: d.options.CommandLimit, Check: d.checkSockets}, err
}

// while returns a context that is also canceled when the daemon ends.
func (d *daemon) while(ctx context.Context) (context.Context, context.CancelFunc) {
	return d.process.Context(ctx, "the control daemon")
}

// adopt watches the daemon of the record, if an earlier supervisor started it.
func (d *daemon) adopt(ctx context.Context) error {
	if d.process != nil || d.record.Daemon == nil {
		return nil
	}
	var err error
	if d.process, err = process.Adopt(*d.record.Daemon, d.unwatched); err != nil {
		return err
	}
	if d.process != nil {
		klog.FromContext(ctx).Info("MPS control daemon adopted", "pid", d.process.PID)
		d.watchServers()
		d.noteOpenFiles(ctx)                         // an earlier version may have given them fewer
		if err := d.noteSharedMemory(); err != nil { // nor does its record say that
			return err
		}
	}
	return nil
}

// watchServers reports the end of each server of the record on serverEnded. A server
// that cannot be watched only has its end noticed later.
func (d *daemon) watchServers() {
	watched := d.watched
	d.watched = nil
	for _, id := range d.record.Servers {
		if slices.Contains(watched, id) {
			d.watched = append(d.watched, id)
			continue
		}
		server, err := process.Adopt(id, d.unwatched)
		if server == nil || err != nil {
			continue
		}
		d.watched = append(d.watched, id)
		go func() {
			select {
			case <-server.Done():
				notify(d.serverEnded)
			case <-d.unwatched:
			}
		}()
	}
}

// owns reports whether the daemon started a process. Servers are killed when a
// session ends, and a daemon that is wrong, or is not the one it seems to be, could
// call any process of the host its server.
func (d *daemon) owns(id process.ID) bool {
	parent, err := process.Parent(id.PID)
	child := err == nil && d.record.Daemon != nil && parent == d.record.Daemon.PID
	return child || d.folder.mark().On(id)
}

// changeLimits changes the limits of a running session, or restores the old ones.
func (d *daemon) changeLimits(ctx context.Context, spec mps.Spec) error {
	client, err := d.client()
	if err != nil {
		return err
	}
	servers := append(process.PIDs(d.record.Servers), 0)
	spec = spec.ResetPriority(d.record.Spec)
	if err := client.SetLimits(ctx, spec, servers...); err != nil {
		if errors.Is(err, control.ErrNoPriorities) {
			return err // nothing was set
		}
		if undoErr := client.SetLimits(context.WithoutCancel(ctx), d.record.Spec.ResetPriority(spec), servers...); undoErr != nil {
			return fmt.Errorf("%w; restore the old limits: %w", err, undoErr)
		}
		return err
	}
	changed := d.record
	changed.Spec = spec
	if err := d.folder.save(changed); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("MPS limits changed", "percentage", spec.ThreadPercentage, "memory", spec.Memory, "priority", spec.ClientPriority,
		"oldPercentage", d.record.Spec.ThreadPercentage, "oldMemory", d.record.Spec.Memory, "servers", len(changed.Servers))
	d.record = changed
	status := d.status.get()
	d.publish(status.Phase, status.Message)
	return nil
}

// noteOpenFiles makes it known if the daemon or its servers may open too few files.
func (d *daemon) noteOpenFiles(ctx context.Context) {
	d.warning = ""
	err := checkOpenFiles(append(process.PIDs(d.record.Servers), d.record.Daemon.PID))
	if err != nil {
		d.warning = err.Error()
	}
	d.fewFiles.Log(ctx, err, "MPS may run out of files", "MPS may open enough files again")
}

// recordLoss counts a loss, if clients could lose anything. The caller saves the
// record.
func (d *daemon) recordLoss(ctx context.Context, text string) {
	d.forgetClients()
	if d.record.recordLoss(text, time.Now().UTC().Truncate(time.Second)) {
		klog.FromContext(ctx).Info("MPS clients lost their server", "reason", text, "losses", d.record.Losses)
	}
}

// publish sets the session's status, with the clients that were known before.
func (d *daemon) publish(phase mps.Phase, message string) {
	d.publishClients(phase, message, d.status.get().Clients)
}

func (d *daemon) publishClients(phase mps.Phase, message string, clients []int) {
	r := &d.record
	if phase == mps.Running && message == "" {
		message = d.warning
	}
	status := mps.Status{
		Spec: r.Spec.Clone(), Phase: phase, Message: message,
		Losses: r.Losses, LastLoss: r.LastLoss, LastLossTime: r.LastLossTime, Kills: r.Kills, LastKill: r.LastKill,
		PipeDir: d.folder.clientPipe(),
	}
	if r.SharesMemory {
		status.ShmDir = d.folder.shm()
	}
	if len(r.Servers) > 0 {
		status.Servers, status.Clients = process.PIDs(r.Servers), slices.Clone(clients)
	}
	d.status.set(status)
}
