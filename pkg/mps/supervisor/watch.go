// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/partage-dev/partage/pkg/node/podcgroup"
	"github.com/partage-dev/partage/pkg/node/process"
)

// procfs has the processes of the host.
var procfs = os.DirFS("/proc")

// watch notices the ends of a session's servers and clients. The session's lock guards it.
type watch struct {
	// ended is told of them.
	ended chan<- struct{}
	// unwatched ends the watching.
	unwatched chan struct{}

	watched []process.ID
	clients map[int]*client
	// death says how the first client was killed that was not terminated before.
	death string
}

// client is a process of a pod that uses a session. A client that is killed while the GPU
// works for it leaves the server, and all other clients, in an undefined state (NVIDIA's MPS
// documentation, "Client Early Termination").
type client struct {
	process *process.Process
	pod     podcgroup.Pod
	// oomKills are those of its pod before, if that is known.
	oomKills int
	counted  bool
	// terminated: the server has ended what it had, so that it may be killed. tried is when that was asked for last.
	terminated bool
	tried      time.Time
	// done is closed when it has ended, and killed then says how it was killed. That is
	// empty if it is not known to have been.
	done   chan struct{}
	killed string
}

// servers watches these servers. One that cannot be watched only has its end noticed later.
func (w *watch) servers(ids []process.ID) {
	for _, id := range ids {
		if slices.Contains(w.watched, id) {
			continue
		}
		server, err := process.Adopt(id, w.unwatched)
		if server == nil || err != nil {
			continue
		}
		w.watched = append(w.watched, id)
		onEnd(server, w.unwatched, func() { notify(w.ended) })
	}
}

// forget forgets the clients of servers that are gone, and what happened to them.
func (w *watch) forget() {
	if w.unwatched != nil {
		close(w.unwatched)
	}
	w.unwatched, w.watched, w.clients, w.death = make(chan struct{}), nil, nil, ""
}

// see watches the clients of servers, as far as they are in pods.
func (w *watch) see(pids []int, servers []process.ID) {
	w.servers(servers)
	var fresh []int
	for _, pid := range pids {
		if w.clients[pid] == nil {
			fresh = append(fresh, pid)
		}
	}
	if len(fresh) == 0 {
		return
	}
	for _, pid := range credible(fresh, servers) {
		w.client(pid)
	}
}

// client watches a client. It returns nil for a process that has ended or cannot be watched.
func (w *watch) client(pid int) *client {
	if c := w.clients[pid]; c != nil {
		return c
	}
	id, err := process.Identify(pid)
	if err != nil {
		return nil
	}
	c := &client{done: make(chan struct{})}
	if c.process, err = process.Adopt(id, w.unwatched); c.process == nil || err != nil {
		return nil
	}
	c.pod, _ = podcgroup.OfProcess(procfs, pid)
	c.oomKills, c.counted = c.pod.OOMKills(procfs)
	if w.clients == nil {
		w.clients = map[int]*client{}
	}
	w.clients[pid] = c
	onEnd(c.process, w.unwatched, func() {
		// Now, since the cgroup of its pod goes as well.
		c.killed = c.howKilled()
		close(c.done)
		if c.killed != "" {
			notify(w.ended)
		}
	})
	return c
}

// onEnd calls a function when a process has ended, until unwatched is closed.
func onEnd(p *process.Process, unwatched <-chan struct{}, do func()) {
	go func() {
		select {
		case <-p.Done():
			do()
		case <-unwatched:
		}
	}()
}

func (c *client) howKilled() string {
	now, counted := c.pod.OOMKills(procfs)
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

// killed returns how a client was killed that was not terminated before, or nothing. It forgets all that have ended: their PIDs
// may be used again.
func (w *watch) killed() string {
	for pid, c := range w.clients {
		select {
		case <-c.done:
		default:
			continue
		}
		if delete(w.clients, pid); c.killed != "" && !c.terminated && w.death == "" {
			w.death = fmt.Sprintf("a client (%s) was killed: %s", c.process.ID, c.killed)
		}
	}
	return w.death
}

// terminable returns a client that is not terminated yet, unless that was tried just now.
func (w *watch) terminable(pid int, now time.Time, interval time.Duration) *client {
	c := w.client(pid)
	if c == nil || c.terminated || c.process.Ended() || now.Sub(c.tried) < interval {
		return nil
	}
	return c
}

// harmed is how many clients would lose something with their server.
func (w *watch) harmed(pids []int) (n int) {
	for _, pid := range pids {
		if c := w.clients[pid]; (c == nil || !c.terminated) && process.Alive(pid) {
			n++
		}
	}
	return n
}
