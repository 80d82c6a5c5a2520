// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"slices"
	"time"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/node/process"
)

// Goal is what somebody wants of a session.
type Goal uint8

// The goals.
const (
	Running   Goal = iota
	Suspended      // nothing of it runs, and the next supervisor starts it again
	Removed
)

// Observation is what is known of a session at one moment.
type Observation struct {
	Now   time.Time
	Goal  Goal
	Times Times
	// Wanted is the spec that the session shall get. It differs from the record's in nothing that cannot change.
	Wanted mps.Spec
	// Calling: somebody waits for the session, so that no start is put off.
	Calling bool
	Record  Record
	Pace    Pace

	// Keeps: there is a keeper, which ends with all that the daemon has started. Ended says how the last one did; it is
	// empty where that is not known.
	Keeps bool
	Ended string
	// Unmounted are the folders that running containers have, and that are not mounted any more.
	Unmounted []string
	// Replaced says that a socket of the daemon is another one, or gone.
	Replaced string
	// Silent is why the daemon has not answered. What follows is known only where it has.
	Silent string

	// Daemon is the process that listens on the daemon's Sockets. Both are found only where the record has none.
	Daemon  process.ID
	Sockets map[string]process.Socket
	Servers []Server
	// Gone are the servers of the record that the daemon does not list any more.
	Gone []process.ID
	// Clients are those of all servers, and Before those at the last observation.
	Clients, Before []int
	// Childless says that the daemon, which was told to start a server, has no process.
	Childless bool
	// Killed is how a client was killed since the last observation.
	Killed string
	// Harmed is how many clients would lose something with their server: those of the last observation, where the daemon does
	// not answer.
	Harmed int
	// Doomed are clients whose pod is about to be killed.
	Doomed []Client
}

// Server is a process that a daemon calls its server.
type Server struct {
	ID process.ID
	// Alive: the daemon may not have noticed its end. Own: the daemon has started it.
	Alive, Own bool
	State      control.State
	// Unlimited says which limit it does not have, where it is active.
	Unlimited string
	// User is as whom it runs.
	User string
}

// IDs returns that of each server.
func IDs(servers []Server) (ids []process.ID) {
	for i := range servers {
		ids = append(ids, servers[i].ID)
	}
	return ids
}

// Client is a client of a server.
type Client struct{ Server, PID int }

// Times are how long things take, or may take.
type Times struct {
	// Check is the time between two observations of a session in which nothing happens.
	Check time.Duration
	// Start is how long a start may take, and Fault how long a server may take no clients after a fault.
	Start, Fault time.Duration
	// FirstPause follows the second failed start in a row, and doubles up to LongestPause.
	FirstPause, LongestPause time.Duration
}

// Pace is what a supervisor remembers of a session, and may forget: when something was seen first.
type Pace struct {
	// Failures are the failed starts in a row, and Next is before when there is no other.
	Failures int
	Next     time.Time
	// Started is when the daemon was started, Ready when clients could connect the last time.
	Started, Ready time.Time
	// Silent is since when the daemon does not answer, Faulty since when its server takes no clients, Replaced since when
	// its sockets are not its own.
	Silent, Faulty, Replaced time.Time
	// Asked: the daemon was told to start a server, and has not had one that was ready since. Listed is its PID, if it
	// was seen. Parent is when the daemon was seen to have a process.
	Asked  bool
	Listed int
	Parent time.Time
}

// Fail counts a failed start.
func (p *Pace) Fail(now time.Time, t Times) {
	p.Failures++
	pause := time.Duration(0)
	if p.Failures > 1 {
		// 16 doublings reach any sensible longest pause.
		pause = min(t.LongestPause, t.FirstPause<<min(p.Failures-2, 16))
	}
	p.Next = now.Add(pause)
}

// Phase is that of a session that does not start.
func (p *Pace) Phase() mps.Phase {
	if p.Failures >= failuresToFail {
		return mps.Failed
	}
	return mps.Starting
}

// end counts the end of what ran as a failure: the first one, if it ran for long.
func (p *Pace) end(now time.Time, t Times) {
	if now.Sub(p.Ready) > t.LongestPause {
		p.Failures = 0
	}
	p.Fail(now, t)
}

// since notes when something was seen first, and returns how long that is ago.
func since(first *time.Time, now time.Time) time.Duration {
	if first.IsZero() {
		*first = now
	}
	return now.Sub(*first)
}

// known reports whether the servers are those of the record.
func (o *Observation) known() bool {
	return slices.EqualFunc(o.Servers, o.Record.Servers, func(s Server, id process.ID) bool { return s.ID == id })
}
