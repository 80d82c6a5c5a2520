// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/test/expect"
)

// These are about what is written down, counted and waited for, which the model does not look at.

// observed is an observation of the session that runs, changed.
func observed(change func(w *world, o *Observation)) Observation {
	w := running()
	change(&w, &Observation{})
	o := w.observe()
	change(&world{}, &o)
	return o
}

// TestSilenceInTime: a daemon that does not answer is Failed after three checks, and replaced after fifteen.
func TestSilenceInTime(t *testing.T) {
	for checks, want := range map[int]struct {
		do    Action
		phase mps.Phase
	}{2: {Rest, ""}, 3: {Rest, mps.Failed}, 14: {Rest, mps.Failed}, 15: {Stop, mps.Starting}} {
		d := Decide(observed(func(w *world, o *Observation) {
			w.Daemon, w.Clients, o.Pace.Silent = silent, 0, now.Add(-time.Duration(checks)*times.Check)
		}))
		if d.Action != want.do || d.Phase != want.phase {
			t.Errorf("after %d checks: got %d, %q, want %d, %q", checks, d.Action, d.Phase, want.do, want.phase)
		}
	}
}

// TestDaemonWithoutProcess: one that was told to start a server may have no process for a moment.
func TestDaemonWithoutProcess(t *testing.T) {
	for has, want := range map[time.Duration]Action{childless - 1: Observe, childless: Stop} {
		d := Decide(observed(func(w *world, o *Observation) {
			w.Server, w.Clients, w.Record.Server = none, 0, -1
			o.Pace.Asked, o.Pace.Parent, o.Pace.Started = true, now.Add(-has), now
		}))
		expect.Equal(t, d.Action, want, "without a process for", has)
	}
}

// TestFailuresInARow: pauses double up to the longest, and what ran for long begins anew.
func TestFailuresInARow(t *testing.T) {
	for failures, want := range map[int]time.Duration{
		1: 0, 2: times.FirstPause, 3: 2 * times.FirstPause, 4: min(4*times.FirstPause, times.LongestPause), 99: times.LongestPause,
	} {
		p := Pace{Failures: failures - 1}
		if p.Fail(now, times); p.Failures != failures || p.Next.Sub(now) != want {
			t.Errorf("failure %d: got %d, a pause of %s, want %s", failures, p.Failures, p.Next.Sub(now), want)
		}
	}
	for ran, want := range map[time.Duration]int{times.LongestPause: 8, times.LongestPause + 1: 1} {
		p := Pace{Failures: 7, Ready: now.Add(-ran)}
		if p.end(now, times); p.Failures != want {
			t.Errorf("it ran for %s: %d failures in a row, want %d", ran, p.Failures, want)
		}
		serving := Decide(observed(func(_ *world, o *Observation) { o.Pace.Failures, o.Pace.Ready = 7, now.Add(-ran) })).Pace
		if reset := serving.Failures == 0; reset != (want == 1) {
			t.Errorf("it runs for %s: %d failures in a row", ran, serving.Failures)
		}
	}
}

// TestWrittenDown: what is noted about the clients, before something is done.
func TestWrittenDown(t *testing.T) {
	suspended := Decide(observed(func(_ *world, o *Observation) { o.Goal = Suspended }))
	if suspended.Action != Suspend || suspended.Record.Losses != 1 || suspended.Record.Serving {
		t.Errorf("suspended: %+v", suspended)
	}
	killed := Decide(observed(func(w *world, _ *Observation) { w.Killed = true }))
	if r := killed.Record; r.Kills != 1 || r.LastKill != "a client was killed" || !r.Reported || r.ClientKilled == "" {
		t.Errorf("a client was killed: %+v", r)
	}
	if again := Decide(observed(func(_ *world, o *Observation) {
		if o.Servers != nil {
			o.Record = killed.Record
		}
	})); again.Action == Save || again.Record.Kills != 1 {
		t.Errorf("a kill is counted again: %+v", again)
	}
	replaced := Decide(observed(func(w *world, _ *Observation) { w.Killed, w.Clients = true, 0 }))
	if replaced.Action != ReplaceServers || replaced.Record.ClientKilled == "" || replaced.Record.Losses != 0 {
		t.Errorf("who looks next must not trust the servers: %+v", replaced)
	}
}

// TestWished: what is wanted now is taken before something is started, and the reaction to a kill at once.
func TestWished(t *testing.T) {
	for name, change := range map[string]func(w *world, o *Observation){
		"a daemon is started": func(w *world, _ *Observation) {
			*w = world{Record: recordState{Server: -1, Limits: 1}, Wanted: 2, Calling: true}
		},
		"a server is started": func(w *world, _ *Observation) { w.endServer(none); w.Record.Server, w.Wanted = -1, 2 },
	} {
		o := observed(change)
		if d := Decide(o); d.Action != Start && d.Action != StartServer || !d.Record.Spec.SameLimits(o.Wanted) || o.Record.Spec.SameLimits(o.Wanted) {
			t.Errorf("%s: got %d with %+v, want %+v", name, d.Action, d.Record.Spec, o.Wanted)
		}
	}
	d := Decide(observed(func(_ *world, o *Observation) { o.Wanted.OnClientKilled = mps.RestartServer }))
	if d.Action != Save || d.Record.Spec.OnClientKilled != mps.RestartServer {
		t.Errorf("another reaction: got %d, %+v", d.Action, d.Record.Spec)
	}
}

// TestDoomed: what clients have on the GPU ends before their pod is killed, whatever else is to be done with a session that works.
func TestDoomed(t *testing.T) {
	for name, change := range map[string]func(w *world){"nothing else": func(*world) {}, "other limits": func(w *world) { w.Wanted = 2 }} {
		d := Decide(observed(func(w *world, o *Observation) { change(w); o.Doomed = []Client{{PID: 7}} }))
		if d.Action != Terminate || d.Phase != mps.Running {
			t.Errorf("%s: got %d, %q", name, d.Action, d.Phase)
		}
	}
}

// TestServerIsRecorded: a server that is listed is the daemon's to end from then on.
func TestServerIsRecorded(t *testing.T) {
	o := observed(func(w *world, _ *Observation) { w.Server, w.Record.Server, w.Record.Serving = initializing, -1, false })
	if d := Decide(o); len(d.Record.Servers) != 1 || d.Record.Servers[0] != o.Servers[0].ID || o.Servers[0].State == control.StateActive {
		t.Errorf("got %+v", d.Record)
	}
}
