// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"time"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/node/process"
)

// The world of the model has one session. Whatever is in it can be compared, so that a state is looked at once.

// now is the time of each observation. What was before is long ago once time has passed.
var now = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)

var times = Times{Check: 2 * time.Second, Start: time.Minute, Fault: 2 * time.Minute, FirstPause: time.Second, LongestPause: 30 * time.Second}

// when is a time of the pace.
type when uint8

const (
	never when = iota
	longAgo
	justNow
	soon
)

func (w when) time() time.Time {
	return map[when]time.Time{never: {}, longAgo: now.Add(-time.Hour), justNow: now, soon: now.Add(time.Second)}[w]
}

func whenOf(t time.Time) when {
	switch {
	case t.IsZero():
		return never
	case t.After(now):
		return soon
	case t.Equal(now):
		return justNow
	}
	return longAgo
}

// daemonState is that of the control daemon.
type daemonState uint8

const (
	absent   daemonState = iota
	starting             // it has no sockets yet
	answers
	silent // it was stopped, say
)

// serverState is that of its only server.
type serverState uint8

const (
	none serverState = iota
	initializing
	active
	faulty
	dead // and the daemon has not noticed
)

// paceState is what the supervisor remembers.
type paceState struct {
	Failures                                               int8
	Next, Started, Ready, Silent, Faulty, Replaced, Parent when
	Asked, Listed                                          bool
}

// recordState is what is written down. A session without record is gone.
type recordState struct {
	Started, Removing, Serving, Daemon, Sockets, ClientKilled, Reported bool
	Server                                                              int8
	Limits                                                              int8
	Losses, Kills                                                       int8
}

type world struct {
	Daemon daemonState
	// Foreign: a socket was replaced. Unmounted: something was unmounted.
	Foreign, Unmounted bool
	Server             serverState
	// ID tells servers apart. Limits are those of the server, and Defaults those of the next one.
	ID, Limits, Defaults int8
	// Published: containers have the socket. Clients is how many there are.
	Published bool
	Clients   int8
	// Killed, and Ended, are what the supervisor has seen of a client and of the daemon, and not written down.
	Killed, Ended bool

	Record recordState
	Pace   paceState
	// Wanted are the limits that a caller wants, 1 or 2. Calling: it waits. Gone: the session was removed.
	Wanted        int8
	Calling, Gone bool
	Restart       bool

	// Harmed: the session was serving, and clients have lost their server since, which was not counted yet.
	Harmed bool
	// Faults is how much more may happen.
	Faults int8
}

// ids are the servers that there can be at a time: of now, and of before.
const ids = 3

func server(id int8) process.ID { return process.ID{PID: int(id) + 1, Start: 1} }

func spec(limits int8, restart bool) mps.Spec {
	s := mps.Spec{ID: "gpu", Devices: []string{"GPU-1"}, ThreadPercentage: int(limits) * 10, MultiUser: true}
	if restart {
		s.OnClientKilled = mps.RestartServer
	}
	return s
}

func (w *world) record() Record {
	r := Record{
		Spec: spec(w.Record.Limits, w.Restart), Started: w.Record.Started, Removing: w.Record.Removing, Serving: w.Record.Serving,
		Reported: w.Record.Reported, History: mps.History{Losses: int(w.Record.Losses), Kills: int(w.Record.Kills)},
	}
	if w.Record.Daemon {
		r.Daemon = &process.ID{PID: 100, Start: 1}
	}
	if w.Record.Sockets {
		r.Sockets = map[string]process.Socket{"control": {}}
	}
	if w.Record.Server >= 0 {
		r.Servers = []process.ID{server(w.Record.Server)}
	}
	if w.Record.ClientKilled {
		r.ClientKilled = "a client was killed"
	}
	return r
}

// remember is the inverse of record.
func (w *world) remember(r *Record) {
	w.Record = recordState{
		Started: r.Started, Removing: r.Removing, Serving: r.Serving, Daemon: r.Daemon != nil, Sockets: len(r.Sockets) > 0,
		ClientKilled: r.ClientKilled != "", Reported: r.Reported, Server: -1, Limits: int8(r.Spec.ThreadPercentage / 10), Losses: int8(r.Losses), Kills: int8(r.Kills),
	}
	if len(r.Servers) > 0 {
		w.Record.Server = int8(r.Servers[0].PID - 1)
	}
}

func (w *world) pace() Pace {
	p := Pace{
		Failures: int(w.Pace.Failures), Next: w.Pace.Next.time(), Started: w.Pace.Started.time(), Ready: w.Pace.Ready.time(),
		Silent: w.Pace.Silent.time(), Faulty: w.Pace.Faulty.time(), Replaced: w.Pace.Replaced.time(), Parent: w.Pace.Parent.time(), Asked: w.Pace.Asked,
	}
	if w.Pace.Listed {
		p.Listed = 1
	}
	return p
}

func (w *world) rememberPace(p *Pace) {
	w.Pace = paceState{
		Failures: int8(min(p.Failures, failuresToFail)), Next: whenOf(p.Next), Started: whenOf(p.Started), Ready: whenOf(p.Ready),
		Silent: whenOf(p.Silent), Faulty: whenOf(p.Faulty), Replaced: whenOf(p.Replaced), Parent: whenOf(p.Parent), Asked: p.Asked, Listed: p.Listed != 0,
	}
}

// observe is what a supervisor sees.
func (w *world) observe() Observation {
	o := Observation{
		Now: now, Times: times, Wanted: spec(w.Wanted, w.Restart), Calling: w.Calling, Record: w.record(), Pace: w.pace(),
		Keeps: w.Daemon != absent, Before: make([]int, w.Clients),
	}
	if w.Record.Removing || !w.Record.Started && !w.Calling {
		o.Goal = Removed
	}
	if w.Unmounted {
		o.Unmounted = []string{"pipe"}
	}
	switch {
	case !o.Keeps:
		if w.Ended {
			o.Ended = "killed"
		}
		return o
	case w.Daemon != answers:
		o.Silent, o.Harmed = "no answer", int(w.Clients)
		return o
	}
	if w.Foreign {
		o.Replaced = "a socket is another"
	}
	if !w.Record.Sockets {
		o.Daemon, o.Sockets = process.ID{PID: 100, Start: 1}, map[string]process.Socket{"control": {}}
	}
	o.Clients = o.Before
	if w.Server != none {
		s := Server{ID: server(w.ID), Alive: w.Server != dead, Own: true, State: "INITIALIZING"}
		switch w.Server { //nolint:exhaustive // the others are not there, or not ready
		case active, dead:
			s.State = control.StateActive
			if w.Limits != w.Record.Limits {
				s.Unlimited = "too much"
			}
		case faulty:
			s.State = control.StateFault
		}
		o.Servers = []Server{s}
	}
	if w.Record.Server >= 0 && (w.Server == none || w.ID != w.Record.Server) {
		o.Gone = []process.ID{server(w.Record.Server)}
	}
	o.Childless = w.Server == none
	if w.Killed {
		o.Killed = "a client was killed"
	}
	o.Harmed = int(w.Clients)
	return o
}

// endServer ends the server, and its clients with it.
func (w *world) endServer(state serverState) {
	if w.Server == active || w.Server == faulty {
		w.Harmed = w.Harmed || w.Record.Serving
	}
	w.Server, w.Clients, w.Killed = state, 0, false
}

func (w *world) endDaemon() {
	w.endServer(none)
	w.Daemon, w.Foreign, w.Defaults = absent, false, 0
}

// isWell reports whether there is no reason to end anything.
func (w *world) isWell() bool {
	return w.Daemon == answers && w.Server == active && !w.Foreign && !w.Unmounted && !w.Record.ClientKilled && !w.Killed
}
