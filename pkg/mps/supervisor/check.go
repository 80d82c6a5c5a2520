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
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/mps/process"
)

// check compares what runs with what is wanted, repairs what it can, and publishes
// the session's phase. An error means that the session does not run.
func (r *repairer) check(ctx context.Context) error {
	d := r.daemon
	lost, err := d.folder.lost()
	if err != nil {
		return err
	}
	if len(lost) > 0 {
		return r.replaceDaemon(ctx, fmt.Errorf("somebody unmounted %s of the MPS session", strings.Join(lost, ",")))
	}
	if !d.record.Private {
		return r.replaceDaemon(ctx, fmt.Errorf("containers of an earlier version can replace the sockets of the control daemon (%s)", d.process.ID))
	}
	client, err := d.client()
	if err == nil && len(d.record.Sockets) == 0 {
		err = d.recordSockets(ctx) // an earlier supervisor did not come to do it
	}
	if err != nil {
		return r.handleSilence(ctx, err)
	}
	alive, cancel := d.while(ctx)
	defer cancel()
	servers, err := client.Inspect(alive, process.PIDs(d.record.Servers), d.record.Spec)
	if errors.Is(err, errSockets) && !d.endsAlone(ctx) {
		return r.replaceDaemon(ctx, err)
	}
	if err != nil {
		return r.handleSilence(ctx, err)
	}
	r.silentSince = time.Time{}
	if i := slices.IndexFunc(servers, func(s control.Server) bool { return !process.AnyAlive([]int{s.PID}) }); i >= 0 {
		// The daemon has not noticed, and may soon have another server.
		d.publish(mps.Starting, fmt.Sprintf("the server with PID %d has ended", servers[i].PID))
		return nil
	}
	r.recordServerEnds(ctx, servers)
	if len(servers) == 0 {
		return r.startServer(ctx, alive, client)
	}
	if err := r.evaluate(alive, client, servers); err != nil || d.status.get().Phase != mps.Running {
		return err
	}
	return r.handleKills(ctx, servers)
}

// startServer starts a server of a daemon that has none, unless that failed a moment ago.
// alive ends with the daemon.
func (r *repairer) startServer(ctx, alive context.Context, client control.Client) error {
	d := r.daemon
	d.publish(mps.Starting, "there is no server")
	if r.backoff.delay() > 0 {
		return errDelayed
	}
	if err := d.startServer(alive, client); err != nil {
		err = errors.Join(fmt.Errorf("%w; %s", err, d.folder.logs().tail()), d.stop(context.WithoutCancel(ctx)))
		r.publishFailure(err)
		return err
	}
	return nil
}

// evaluate publishes the phase that follows from the servers' states, and makes
// active servers have the session's limits.
func (r *repairer) evaluate(ctx context.Context, client control.Client, servers []control.Server) error {
	d := r.daemon
	known := slices.Equal(control.PIDs(servers), process.PIDs(d.record.Servers))
	var clients []int
	active := false
	for _, server := range servers {
		clients = append(clients, server.Clients...)
		active = active || server.State == control.StateActive
		if server.State == control.StateFault {
			return r.awaitFaulty(ctx, server.PID, clients)
		}
	}
	r.faultySince = time.Time{}
	switch {
	case !active:
		state := fmt.Sprintf("the server with PID %d is %s", servers[0].PID, servers[0].State)
		if d.record.Serving && known {
			// It was active before, so it recovers from a fault between two checks.
			if err := r.recordFault(ctx, "a fatal fault of a client seems to have ended all clients: "+state+" again"); err != nil {
				return err
			}
		}
		d.publishClients(mps.Starting, state, clients)
		return nil
	case !d.record.Serving || !known:
		if err := d.accept(ctx, client, servers); err != nil {
			d.publish(mps.Failed, err.Error())
			return err
		}
	default:
		if err := r.enforceLimits(ctx, client, servers); err != nil {
			d.publish(mps.Failed, err.Error())
			return err
		}
	}
	d.publishClients(mps.Running, "", clients)
	return nil
}

// awaitFaulty waits for the clients of a faulty server to end, which revives it, and
// replaces the daemon when that takes too long.
func (r *repairer) awaitFaulty(ctx context.Context, server int, clients []int) error {
	d := r.daemon
	text := fmt.Sprintf("a fatal fault of a client ended all clients of the server with PID %d", server)
	if err := r.recordFault(ctx, text); err != nil {
		return err
	}
	if r.faultySince.IsZero() {
		r.faultySince = time.Now()
	}
	if waited := time.Since(r.faultySince); waited >= d.options.FaultLimit {
		return r.replaceDaemon(ctx, fmt.Errorf("%s, and not all of them have ended within %s", text, d.options.FaultLimit))
	}
	d.publishClients(mps.Faulted, fmt.Sprintf("%s; the server accepts no new ones until the connected ones have ended, or for %s",
		text, d.options.FaultLimit), clients)
	return nil
}

func (r *repairer) recordFault(ctx context.Context, text string) error {
	if !r.daemon.record.Serving {
		return nil // recorded before
	}
	r.daemon.recordLoss(ctx, text)
	return r.daemon.folder.save(r.daemon.record)
}

// enforceLimits sets the limits of active servers that do not have them. Containers
// cannot change them, but root on the node can.
func (r *repairer) enforceLimits(ctx context.Context, client control.Client, servers []control.Server) error {
	spec := r.daemon.record.Spec
	for _, server := range servers {
		if server.State != control.StateActive {
			continue
		}
		if err := server.Limits.Check(spec); err != nil {
			klog.FromContext(ctx).Info("Somebody changed the limits of an MPS server, restoring them", "pid", server.PID, "reason", err)
			if err := client.SetLimits(ctx, spec, server.PID); err != nil {
				return err
			}
		}
	}
	return nil
}

// recordServerEnds records the loss that the end of known servers was, once. servers
// are those that run now.
func (r *repairer) recordServerEnds(ctx context.Context, servers []control.Server) {
	d := r.daemon
	var ended, left []process.ID
	for _, known := range d.record.Servers {
		if runs(known, servers) {
			left = append(left, known)
		} else {
			ended = append(ended, known)
		}
	}
	if len(ended) == 0 {
		return
	}
	replaced := r.mayBeReplaced(servers)
	if replaced && servers[0].State != control.StateActive {
		return // it may still run as root, and is looked at again
	}
	for _, id := range ended {
		id.Reap()
	}
	text := fmt.Sprintf("the server (%s) ended", joinIDs(ended))
	if replaced && r.servesAnotherUser(servers[0].PID) {
		klog.FromContext(ctx).Info("MPS replaced a server by one for another user", "reason", text, "pid", servers[0].PID)
	} else {
		d.recordLoss(ctx, text)
		r.backoff.ended(d.readySince)
	}
	d.record.Servers = left
	if err := d.folder.save(d.record); err != nil {
		klog.FromContext(ctx).Error(err, "MPS loss cannot be recorded")
	}
}

// runs reports whether a known server is among those that run now.
func runs(known process.ID, servers []control.Server) bool {
	if now, err := process.Identify(known.PID); err == nil && now != known {
		return false // another server reuses the PID
	}
	return slices.Contains(control.PIDs(servers), known.PID)
}

func joinIDs(ids []process.ID) string {
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = id.String()
	}
	return strings.Join(texts, ", ")
}

// mayBeReplaced reports whether MPS may have ended a server for the sake of a client of
// another user: it does so when the last client has gone. A server that had clients at the
// last look counts as lost, although they may have gone since: only the daemon's log says
// how it ended, and clients can write to that.
func (r *repairer) mayBeReplaced(servers []control.Server) bool {
	d := r.daemon
	return !d.record.Spec.MultiUser && len(servers) > 0 && len(d.status.get().Clients) == 0
}

// servesAnotherUser reports whether a server serves another user than the last one
// did.
func (r *repairer) servesAnotherUser(server int) bool {
	last, now := r.daemon.record.ServerUser, userOf(server)
	return last != "" && now != "" && last != now
}

// userOf returns the user as whom a server runs, which is that of its clients unless it
// serves several. It is empty if the server has ended.
func userOf(server int) string {
	// The folder's owner would be root for a server that has given up its rights.
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(server), "status"))
	if err != nil {
		return ""
	}
	_, users, _ := strings.Cut(string(data), "\nUid:")
	if fields := strings.Fields(users); len(fields) > 0 {
		return fields[0]
	}
	return ""
}

// handleSilence handles a daemon that does not answer. Its servers may be fine
// without it, so it is only replaced when that ends no client.
func (r *repairer) handleSilence(ctx context.Context, cause error) error {
	d := r.daemon
	// If the daemon ended, the monitor restarts it; if ctx is done, it had no time to
	// answer.
	if d.process.Ended() || ctx.Err() != nil {
		return cause
	}
	if r.silentSince.IsZero() {
		r.silentSince = time.Now()
	}
	status := d.status.get()
	cause = fmt.Errorf("the control daemon (%s) does not answer: %w", d.process.ID, cause)
	switch silence, interval := time.Since(r.silentSince), d.options.CheckInterval; {
	case silence >= intervalsToReplace*interval && len(d.believed(status.Clients)) == 0:
		return r.replaceDaemon(ctx, cause)
	case silence >= intervalsToFail*interval:
		d.publish(mps.Failed, cause.Error())
	default:
		d.publish(status.Phase, cause.Error())
	}
	return cause
}
