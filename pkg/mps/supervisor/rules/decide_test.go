// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/mps"
)

// running is a session with one client.
func running() world {
	return world{
		Daemon: answers, Server: active, ID: 1, Limits: 1, Defaults: 1, Wanted: 1, Published: true, Clients: 1,
		Record: recordState{Started: true, Serving: true, Daemon: true, Sockets: true, Server: 1, Limits: 1},
	}
}

// TestDecide shows what is done next in each situation, and what people read.
func TestDecide(t *testing.T) {
	for name, test := range map[string]struct {
		change func(w *world)
		do     Action
		phase  mps.Phase
		says   string
	}{
		"all is well":             {func(*world) {}, Rest, mps.Running, ""},
		"nothing runs yet":        {func(w *world) { *w = world{Record: recordState{Server: -1}, Calling: true} }, Start, "", ""},
		"never begun":             {func(w *world) { *w = world{Record: recordState{Server: -1}} }, Remove, "", ""},
		"put off":                 {func(w *world) { w.endDaemon(); w.Record.Sockets, w.Pace.Next = false, soon }, Rest, "", ""},
		"put off, and wanted":     {func(w *world) { w.endDaemon(); w.Record.Sockets, w.Pace.Next, w.Calling = false, soon, true }, Start, "", ""},
		"daemon killed":           {func(w *world) { w.endDaemon(); w.Ended = true }, Save, mps.Starting, "the control daemon (PID 100) ended: killed"},
		"daemon gone at restart":  {func(w *world) { w.endDaemon() }, Save, mps.Starting, "ended together with the supervisor, or while there was none"},
		"daemon without sockets":  {func(w *world) { w.Record.Sockets = false }, Save, "", ""},
		"server ended":            {func(w *world) { w.endServer(none) }, Save, mps.Starting, "the server (PID 2) ended"},
		"server ended, unnoticed": {func(w *world) { w.endServer(dead) }, Observe, mps.Starting, "the server with PID 2 has ended"},
		"no server":               {func(w *world) { w.endServer(none); w.Record.Server = -1 }, StartServer, mps.Starting, "there is no server"},
		"no server for long": {func(w *world) {
			w.endServer(none)
			w.Record.Server, w.Pace.Asked, w.Pace.Parent = -1, true, longAgo
		}, Stop, mps.Starting, "the server does not start: the control daemon (PID 100) has had no process for 2s"},
		"server starts": {func(w *world) { w.Server, w.Record.Serving = initializing, false }, Observe, mps.Starting, "the server with PID 2 is INITIALIZING"},
		"server starts, forever": {func(w *world) {
			w.Server, w.Record.Serving, w.Pace.Started = initializing, false, longAgo
		}, Stop, mps.Starting, "is INITIALIZING: it was not ready in time"},
		"server that is new":                       {func(w *world) { w.ID = 2; w.Record.Server = -1 }, Accept, "", ""},
		"server that is listed for the first time": {func(w *world) { w.Record.Server, w.Record.Serving = -1, false }, Accept, "", ""},
		"other limits":                             {func(w *world) { w.Limits = 3 }, SetLimits, "", ""},
		"other limits wanted":                      {func(w *world) { w.Wanted = 2 }, ChangeLimits, mps.Running, ""},
		"fault":                                    {func(w *world) { w.Server = faulty }, Rest, mps.Faulted, "accepts no new ones until the connected ones have ended, or for 2m0s"},
		"fault for long":                           {func(w *world) { w.Server, w.Pace.Faulty = faulty, longAgo }, Stop, mps.Starting, "not all of them have ended within 2m0s"},
		"fault before the first client": {func(w *world) {
			w.Server, w.Clients, w.Record.Server, w.Record.Serving, w.Pace.Asked = faulty, 0, -1, false, true
		}, Stop, mps.Starting, "it is faulted although it has had no clients yet"},
		"silent":                          {func(w *world) { w.Daemon = silent }, Rest, "", "the control daemon (PID 100) does not answer: no answer"},
		"silent for long":                 {func(w *world) { w.Daemon, w.Pace.Silent = silent, longAgo }, Rest, mps.Failed, "does not answer"},
		"silent, without clients":         {func(w *world) { w.Daemon, w.Pace.Silent, w.Clients = silent, longAgo, 0 }, Stop, mps.Starting, "does not answer"},
		"silent from the start":           {func(w *world) { w.Daemon, w.Record.Daemon, w.Record.Sockets = starting, false, false }, Observe, mps.Starting, "the control daemon does not answer"},
		"unmounted":                       {func(w *world) { w.Unmounted = true }, Stop, mps.Starting, "somebody unmounted pipe of the MPS session"},
		"socket replaced":                 {func(w *world) { w.Foreign = true }, Observe, mps.Starting, "a socket is another"},
		"socket replaced, and it goes on": {func(w *world) { w.Foreign, w.Pace.Replaced = true, longAgo }, Stop, mps.Starting, "a socket is another"},
		"a client was killed":             {func(w *world) { w.Killed = true }, Save, mps.Running, ""},
		"the last client was killed": {func(w *world) { w.Killed, w.Clients = true, 0 }, ReplaceServers, mps.Starting,
			"a client was killed; NVIDIA calls the state of the server undefined after that"},
		"a client was killed, the policy asks for a restart": {func(w *world) { w.Killed, w.Restart = true, true }, ReplaceServers, mps.Starting,
			"and the sharing policy asks for a restart"},
		"to be removed": {func(w *world) { w.Record.Removing = true }, Remove, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := running()
			test.change(&w)
			d := Decide(w.observe())
			if d.Action != test.do || d.Phase != test.phase || !strings.Contains(d.Message, test.says) || test.says == "" && d.Message != "" {
				t.Errorf("got %d, %q, %q, want %d, %q, %q", d.Action, d.Phase, d.Message, test.do, test.phase, test.says)
			}
		})
	}
}

// TestServerOfAnother shows that a process which the daemon has not started is not taken for its server, nor ended.
func TestServerOfAnother(t *testing.T) {
	for asked, action := range map[bool]Action{false: Rest, true: Stop} {
		w := running()
		w.Pace.Asked = asked
		o := w.observe()
		o.Servers[0].Own = false
		if d := Decide(o); d.Action != action || !strings.Contains(d.Message, "calls PID 2 its server, which it did not start") {
			t.Errorf("asked %t: got %d, %q", asked, d.Action, d.Message)
		}
	}
}

// TestServerForAnotherUser shows that MPS may replace a server without clients by one for another user, and that this is no
// loss; everything else is.
func TestServerForAnotherUser(t *testing.T) {
	for name, test := range map[string]struct {
		change func(o *Observation)
		losses int
	}{
		"for another user": {func(*Observation) {}, 0},
		"same user":        {func(o *Observation) { o.Servers[0].User = "0" }, 1},
		"it had clients":   {func(o *Observation) { o.Before = []int{7} }, 1},
		"for all users":    {func(o *Observation) { o.Record.Spec.MultiUser = true }, 1},
	} {
		w := running()
		w.ID, w.Clients = 2, 0
		o := w.observe()
		o.Record.Spec.MultiUser, o.Record.ServerUser, o.Servers[0].User = false, "0", "1000"
		test.change(&o)
		if d := Decide(o); d.Action != Save || d.Record.Losses != test.losses || len(d.Record.Servers) != 0 {
			t.Errorf("%s: got %d, %d losses, %v", name, d.Action, d.Record.Losses, d.Record.Servers)
		}
	}
}
