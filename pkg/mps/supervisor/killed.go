// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/mps/process"
	"github.com/partage-dev/partage/pkg/mps/tenant"
	"github.com/partage-dev/partage/pkg/wait"
)

// client is a process of a pod that uses a session. A client that is killed while the GPU
// works for it leaves the server, and all other clients, in an undefined state (NVIDIA's MPS
// documentation, "Client Early Termination").
type client struct {
	process *process.Process
	pod     tenant.Pod
	// oomKills are those of its pod before, if that is known.
	oomKills int
	counted  bool
	// terminated: the server has ended what it had, so that it may be killed.
	terminated bool
	// ended is closed when it has ended, and killed then says how it was killed. That is
	// empty if it is not known to have been.
	ended  chan struct{}
	killed string
}

// watch waits for the end of the client and reports it if it was killed.
func (c *client) watch(killed chan<- struct{}, unwatched <-chan struct{}) {
	select {
	case <-c.process.Done():
	case <-unwatched:
		return
	}
	// Now, since the cgroup of its pod goes as well.
	c.killed = c.howKilled()
	close(c.ended)
	if c.killed != "" {
		notify(killed)
	}
}

func (c *client) howKilled() string {
	now, counted := c.pod.OOMKills()
	outOfMemory := c.counted && counted && now > c.oomKills
	switch exit := c.process.Exit(); {
	case exit.Known && !exit.Killed(), !exit.Known && !outOfMemory:
		return ""
	case outOfMemory:
		return "its pod was out of memory"
	default:
		return exit.String()
	}
}

// hasEnded reports whether killed may be read.
func (c *client) hasEnded() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// watchClients makes the ends of clients be noticed, as far as they are in pods.
func (d *daemon) watchClients(pids []int) {
	var fresh []int
	for _, pid := range pids {
		if d.clients[pid] == nil {
			fresh = append(fresh, pid)
		}
	}
	if len(fresh) == 0 {
		return
	}
	for _, pid := range d.believed(fresh) {
		d.watchClient(pid)
	}
}

// watchClient returns nil for a process that has ended or cannot be watched.
func (d *daemon) watchClient(pid int) *client {
	if c := d.clients[pid]; c != nil {
		return c
	}
	id, err := process.Identify(pid)
	if err != nil {
		return nil
	}
	c := &client{ended: make(chan struct{})}
	if c.process, err = process.Adopt(id, d.unwatched); c.process == nil || err != nil {
		return nil
	}
	c.pod, _ = tenant.PodOf(pid)
	c.oomKills, c.counted = c.pod.OOMKills()
	if d.clients == nil {
		d.clients = map[int]*client{}
	}
	d.clients[pid] = c
	go c.watch(d.clientKilled, d.unwatched)
	return c
}

// killedClients returns how clients were killed that have ended since the last call, and
// forgets all that have ended.
func (d *daemon) killedClients(ctx context.Context) []string {
	var killed []string
	for pid, c := range d.clients {
		if !c.hasEnded() {
			continue
		}
		delete(d.clients, pid)
		if c.killed != "" && !c.terminated {
			klog.FromContext(ctx).Info("A client of MPS was killed", "pid", pid, "podUID", c.pod.UID, "how", c.killed)
			killed = append(killed, fmt.Sprintf("a client (%s) was killed: %s", c.process.ID, c.killed))
		}
	}
	slices.Sort(killed)
	return killed
}

// unharmed returns the clients that would lose something with their server.
func (d *daemon) unharmed(pids []int) []int {
	return slices.DeleteFunc(slices.Clone(pids), func(pid int) bool {
		c := d.clients[pid]
		return c != nil && c.terminated || !process.AnyAlive([]int{pid})
	})
}

// undefinedState follows what happened to a client.
const undefinedState = "; NVIDIA calls the state of the server undefined after that"

// handleKills does what the session's reaction to killed clients asks for. Its servers
// are active.
func (r *repairer) handleKills(ctx context.Context, servers []control.Server) error {
	d := r.daemon
	var pids []int
	for _, server := range servers {
		pids = append(pids, server.Clients...)
	}
	d.watchClients(pids)
	if killed := d.killedClients(ctx); len(killed) > 0 && d.record.Doubt == "" {
		d.record.Doubt = killed[0]
		if err := d.folder.save(d.record); err != nil {
			return err
		}
	}
	if d.record.Doubt == "" {
		return nil
	}
	cause := errors.New(d.record.Doubt + undefinedState)
	others := d.unharmed(pids)
	switch {
	case len(others) == 0:
		// Nobody loses anything.
		d.record.Serving = false
		return r.replaceServers(ctx, cause)
	case d.record.Spec.OnClientKilled == mps.RestartServer:
		return r.replaceServers(ctx, fmt.Errorf("%w, and the sharing policy asks for a restart", cause))
	case d.record.Reported:
		return nil
	}
	klog.FromContext(ctx).Info("An MPS server may not work correctly any more; it is replaced as soon as it has no clients",
		"reason", d.record.Doubt, "clients", len(others))
	d.record.Kills++
	d.record.LastKill, d.record.Reported = d.record.Doubt, true
	d.publish(mps.Running, "")
	return d.folder.save(d.record)
}

// replaceServers ends the servers, and the next check starts another. The daemon goes on, so
// that clients which come meanwhile wait instead of doing without MPS. Where it does not do
// what it is told, it is replaced, too.
func (r *repairer) replaceServers(ctx context.Context, cause error) error {
	d := r.daemon
	klog.FromContext(ctx).Error(cause, "Replacing MPS servers", "servers", process.PIDs(d.record.Servers))
	limited, cancel := context.WithTimeout(ctx, d.options.EndLimit)
	defer cancel()
	ctl, err := d.client()
	for _, server := range d.record.Servers {
		if err == nil {
			err = ctl.ShutdownServer(limited, server.PID)
		}
		if err == nil {
			err = wait.Until(limited, func() (bool, error) { return !server.Alive(), nil })
		}
	}
	if err != nil {
		return r.replaceDaemon(ctx, fmt.Errorf("%w; its servers do not end: %w", cause, err))
	}
	d.recordLoss(ctx, cause.Error())
	d.publish(mps.Starting, cause.Error())
	return d.folder.save(d.record)
}

// forgetClients forgets what happened to the clients of servers that are gone.
func (d *daemon) forgetClients() {
	d.clients = nil
	d.record.Doubt, d.record.Reported = "", false
}
