// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package rules decides what happens to an MPS session.
//
//	observe   an Observation: what is wanted, the record, the daemon, its servers and clients
//	decide    Decide(Observation) -> what to do next, what to write down, what to say
//	act       does it, and observes again
//
// A start, the adoption of what an earlier supervisor has left, repairs, the end of clients and of the session are the
// same loop. The rules have no effects; what they remember is in the record, or is pace and may be lost.
package rules

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/node/process"
)

// Action is what is done next. Each is idempotent.
type Action uint8

// What can be done.
const (
	Rest           Action = iota // nothing until the next observation, at Decision.Again
	Observe                      // again, soon: something is under way
	Save                         // nothing but to write down the record
	Remove                       // end all that runs, and remove the session
	Suspend                      // end all that runs, and unmount
	Start                        // end what is left of an earlier daemon, and start another
	Stop                         // end the daemon, and all that it has started
	StartServer                  // give future servers their limits, and containers the socket, and start a server
	Accept                       // make the servers that are listed the session's
	SetLimits                    // of the servers that do not have them
	ChangeLimits                 // to those that are wanted
	ReplaceServers               // end the servers; the daemon goes on
	Terminate                    // end what the doomed clients have on the GPU
)

// Decision is what follows from an observation.
type Decision struct {
	Action Action
	// Record and Pace are what is to be remembered before that is done.
	Record Record
	Pace   Pace
	// Phase is what to say; it is empty where that does not change. Message says why: of what is done, too.
	Phase   mps.Phase
	Message string
	// Failed: a start has failed. Wrong: the session does not do what is wanted.
	Failed, Wrong bool
	// Delayed: the next start is put off until Again, when the session is observed without an event.
	Delayed bool
	Again   time.Duration
}

const (
	// failuresToFail is how many failed starts in a row make a session Failed.
	failuresToFail = 3
	// checksToFail is after how long without an answer a session is Failed, in times between checks…
	checksToFail = 3
	// …and checksToReplace after how long its daemon is replaced, if no client would notice.
	checksToReplace = 15
	// alone is how long a daemon may take to end whose sockets are gone: one that quits removes them first.
	alone = time.Second
	// childless is how long a daemon that was told to start a server may have no process before that counts as failed.
	// That a server fails is rare, and a start that is given up is tried again.
	childless = 2 * time.Second
)

// undefinedState follows what happened to a client.
const undefinedState = "; NVIDIA calls the state of the server undefined after that"

// decision is one in the making. It changes the record and the pace of its observation.
type decision struct {
	Observation
	out Decision
}

// Decide says what to do next about a session.
func Decide(o Observation) Decision {
	d := &decision{Observation: o, out: Decision{Again: o.Times.Check}}
	switch {
	case o.Goal == Removed:
		d.out.Action, d.Record.Removing = Remove, true
	case o.Goal == Suspended:
		d.out.Action = Suspend
		d.Record.lose("the MPS supervisor of the node was stopped, and its daemons with it", o.Now)
	case !o.Keeps:
		d.start()
	case len(o.Unmounted) > 0:
		d.replace(fmt.Sprintf("somebody unmounted %s of the MPS session", strings.Join(o.Unmounted, ",")))
	case o.Replaced != "" && since(&d.Pace.Replaced, o.Now) >= alone:
		d.replace(o.Replaced)
	case o.Replaced != "":
		d.await(o.Replaced)
	case o.Silent != "":
		d.silent()
	default:
		d.Pace.Silent, d.Pace.Replaced = time.Time{}, time.Time{}
		d.judge()
	}
	d.out.Record, d.out.Pace = d.Record, d.Pace
	return d.out
}

// start starts a daemon, after it was noted that the last one has ended.
func (d *decision) start() {
	r, p := &d.Record, &d.Pace
	switch {
	case !p.Started.IsZero() && d.Ended != "":
		r.lose("the control daemon ended: "+d.Ended, d.Now)
		d.giveUp("the control daemon ended: " + d.Ended)
		return
	case len(r.Sockets) > 0:
		how := d.Ended
		if how == "" {
			how = "it ended together with the supervisor, or while there was none"
		}
		text := fmt.Sprintf("the control daemon (%s) ended: %s", r.Daemon, how)
		d.do(Save, mps.Starting, text)
		r.lose(text, d.Now)
		r.Sockets = nil // the rest may be there, and is ended before the next start
		p.end(d.Now, d.Times)
		return
	}
	if d.isDelayed() {
		return
	}
	d.out.Action, r.Spec = Start, d.Wanted
	*p = Pace{Failures: p.Failures, Next: p.Next, Started: d.Now, Ready: p.Ready}
}

// isDelayed puts off a start for which nobody waits, and that has failed too often.
func (d *decision) isDelayed() bool {
	pause := d.Pace.Next.Sub(d.Now)
	if pause <= 0 || d.Calling {
		return false
	}
	d.out.Delayed, d.out.Again = true, pause
	return true
}

// do says what to do, and to people.
func (d *decision) do(action Action, phase mps.Phase, message string) {
	d.out.Action, d.out.Phase, d.out.Message = action, phase, message
}

// replace ends a daemon that is of no more use.
func (d *decision) replace(why string) {
	d.do(Stop, mps.Starting, why)
	d.Record.lose(why, d.Now)
	d.Pace.end(d.Now, d.Times)
}

// giveUp ends a daemon that has not become ready.
func (d *decision) giveUp(why string) {
	d.Pace.Fail(d.Now, d.Times)
	d.do(Stop, d.Pace.Phase(), why)
	d.out.Failed = true
}

// await lets something happen that is under way, for as long as a start may take.
func (d *decision) await(what string) {
	d.do(Observe, mps.Starting, what)
	if since(&d.Pace.Started, d.Now) >= d.Times.Start {
		d.Record.lose("the control daemon did not notice that its server had ended", d.Now)
		d.giveUp(what + ": it was not ready in time")
	}
}

// fail leaves everything as it is, and says what is wrong.
func (d *decision) fail(phase mps.Phase, why string) {
	d.do(Rest, phase, why)
	d.out.Wrong = true
}

// silent judges a daemon that does not answer. Its servers may be fine without it, so it is only replaced when that ends no
// client. One that is being started has the time of a start.
func (d *decision) silent() {
	if len(d.Record.Sockets) == 0 || !d.Pace.Started.IsZero() {
		d.await("the control daemon does not answer: " + d.Silent)
		return
	}
	why := fmt.Sprintf("the control daemon (%s) does not answer: %s", d.Record.Daemon, d.Silent)
	switch silence := since(&d.Pace.Silent, d.Now); {
	case silence >= checksToReplace*d.Times.Check && d.Harmed == 0:
		d.replace(why)
	case silence >= checksToFail*d.Times.Check:
		d.fail(mps.Failed, why)
	default:
		d.fail("", why)
	}
}

// judge judges a daemon that answers.
func (d *decision) judge() {
	if len(d.Record.Sockets) == 0 {
		d.out.Action, d.Record.Daemon, d.Record.Sockets = Save, &d.Daemon, d.Sockets
		return
	}
	for _, s := range d.Servers {
		if !s.Alive { // the daemon has not noticed, and may soon have another server
			d.await(fmt.Sprintf("the server with PID %d has ended", s.ID.PID))
			return
		}
	}
	if len(d.Gone) > 0 && d.noteEnds() {
		return
	}
	if len(d.Servers) == 0 {
		d.startServer()
		return
	}
	for _, s := range d.Servers {
		if s.State == control.StateFault {
			d.faulty(s)
			return
		}
	}
	d.Pace.Faulty = time.Time{}
	d.judgeServers()
}

// noteEnds notes that servers of the record have ended. It returns false if that is not certain yet.
func (d *decision) noteEnds() bool {
	r := &d.Record
	// MPS ends a server when its last client has gone, if a client of another user waits. One that had clients at the last
	// observation counts as lost, although they may have gone since: only the daemon's log says how it ended, and clients
	// can write to that.
	replaced := !r.Spec.MultiUser && len(d.Servers) > 0 && len(d.Before) == 0
	if replaced && d.Servers[0].State != control.StateActive {
		return false // it may still run as root
	}
	text := fmt.Sprintf("the server (%s) ended", joinIDs(d.Gone))
	d.do(Save, mps.Starting, text)
	if !replaced || r.ServerUser == "" || d.Servers[0].User == "" || r.ServerUser == d.Servers[0].User {
		if r.Serving {
			d.Pace.end(d.Now, d.Times)
		}
		r.lose(text, d.Now)
	}
	r.ClientKilled, r.Reported, r.ServerUser = "", false, ""
	r.Servers = slices.DeleteFunc(slices.Clone(r.Servers), func(id process.ID) bool { return slices.Contains(d.Gone, id) })
	return true
}

// startServer starts a server, or waits for the one that the daemon was told to start.
func (d *decision) startServer() {
	p := &d.Pace
	switch {
	case !p.Asked && d.isDelayed():
		d.do(Rest, mps.Starting, "there is no server")
	case !p.Asked:
		d.do(StartServer, mps.Starting, "there is no server")
		d.Record.Spec = d.Wanted
		p.Asked, p.Listed, p.Parent = true, 0, d.Now
		since(&p.Started, d.Now)
	case p.Listed != 0:
		d.giveUp(fmt.Sprintf("the server does not start: it had PID %d and has ended", p.Listed))
	case d.Childless && d.Now.Sub(p.Parent) >= childless:
		d.giveUp(fmt.Sprintf("the server does not start: the control daemon (%s) has had no process for %s", d.Record.Daemon, childless))
	default:
		if !d.Childless {
			p.Parent = d.Now
		}
		d.await("the server does not start")
	}
}

// faulty waits for the clients of a server to end that takes no new ones before, and replaces the daemon when that takes too
// long.
func (d *decision) faulty(s Server) {
	if d.Pace.Asked && len(d.Clients) == 0 {
		d.giveUp("the server does not start: it is faulted although it has had no clients yet")
		return
	}
	text := fmt.Sprintf("a fatal fault of a client ended all clients of the server with PID %d", s.ID.PID)
	d.Record.lose(text, d.Now)
	if since(&d.Pace.Faulty, d.Now) >= d.Times.Fault {
		d.replace(fmt.Sprintf("%s, and not all of them have ended within %s", text, d.Times.Fault))
		return
	}
	d.do(Rest, mps.Faulted, fmt.Sprintf("%s; the server accepts no new ones until the connected ones have ended, or for %s", text, d.Times.Fault))
}

// judgeServers judges servers that run, none of which is faulty.
func (d *decision) judgeServers() {
	r, p := &d.Record, &d.Pace
	isActive := func(s Server) bool { return s.State == control.StateActive }
	foreign := slices.IndexFunc(d.Servers, func(s Server) bool { return !s.Own })
	if foreign < 0 && !r.Serving && !d.known() {
		r.Servers = IDs(d.Servers) // they are ended with the daemon from now on, whatever becomes of its keeper
	}
	switch {
	case foreign >= 0:
		why := fmt.Sprintf("the control daemon (%s) calls %s its server, which it did not start", r.Daemon, d.Servers[foreign].ID)
		if p.Asked {
			d.giveUp("the server has started and cannot be used: " + why)
			return
		}
		d.fail(mps.Failed, why)
	case !slices.ContainsFunc(d.Servers, isActive):
		s := d.Servers[0]
		state := fmt.Sprintf("the server with PID %d is %s", s.ID.PID, s.State)
		if d.known() {
			// It was active before, so it recovers from a fault between two observations.
			r.lose("a fatal fault of a client seems to have ended all clients: "+state+" again", d.Now)
		}
		p.Listed = s.ID.PID
		d.await(state)
	case !r.Serving || !d.known():
		d.out.Action = Accept
	case slices.ContainsFunc(d.Servers, func(s Server) bool { return isActive(s) && s.Unlimited != "" }):
		d.out.Action = SetLimits
	default:
		*p = Pace{Failures: p.Failures, Next: p.Next, Ready: p.Ready}
		if d.Now.Sub(p.Ready) > d.Times.LongestPause {
			p.Failures = 0
		}
		d.serve()
	}
}

// serve judges a session that works.
func (d *decision) serve() {
	r := &d.Record
	d.do(Rest, mps.Running, "")
	if r.ClientKilled == "" && d.Killed != "" {
		r.ClientKilled, d.out.Action = d.Killed, Save
	}
	switch {
	case len(d.Doomed) > 0:
		d.out.Action = Terminate
	case r.ClientKilled != "" && d.Harmed == 0:
		r.Serving = false // nobody loses anything
		d.replaceServers(r.ClientKilled + undefinedState)
	case r.ClientKilled != "" && r.Spec.OnClientKilled == mps.RestartServer:
		d.replaceServers(r.ClientKilled + undefinedState + ", and the sharing policy asks for a restart")
	case r.ClientKilled != "" && !r.Reported:
		r.Kills++
		r.LastKill, r.Reported = r.ClientKilled, true
		d.out.Action = Save
	case r.Spec.OnClientKilled != d.Wanted.OnClientKilled:
		r.Spec.OnClientKilled = d.Wanted.OnClientKilled
		d.out.Action = Save
	case !r.Spec.SameLimits(d.Wanted):
		d.out.Action = ChangeLimits
	}
}

// replaceServers ends the servers; then their end is noted, and another is started. The daemon goes on, so that clients
// which come meanwhile wait instead of doing without MPS. Until then it stays noted that a client was killed: the
// next observation must not trust them.
func (d *decision) replaceServers(why string) {
	killed := d.Record.ClientKilled
	d.Record.lose(why, d.Now)
	d.Record.ClientKilled = killed
	d.do(ReplaceServers, mps.Starting, why)
}

func joinIDs(ids []process.ID) string {
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = id.String()
	}
	return strings.Join(texts, ", ")
}
