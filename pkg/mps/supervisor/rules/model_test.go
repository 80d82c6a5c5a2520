// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
)

// mutant is a rule that is broken on purpose: what it sees or what it says is another.
type mutant struct {
	sees func(o *Observation)
	says func(o *Observation, d *Decision)
}

func (m mutant) decide(o Observation) Decision {
	if m.sees != nil {
		m.sees(&o)
	}
	d := Decide(o)
	if m.says != nil {
		m.says(&o, &d)
	}
	return d
}

// step observes, decides and acts once. After cut effects the supervisor is killed; there are that many in all. The error is
// a promise that was broken.
func (w *world) step(m mutant, cut int) (d Decision, effects int, err error) {
	o := w.observe()
	if d = m.decide(o); cut == 0 {
		w.crash()
		return d, 1, nil
	}
	if len(o.Servers) > 0 && o.Servers[0].State == control.StateFault {
		w.Harmed = w.Harmed || w.Record.Serving // one that passes between two observations is not seen
	}
	isFaulty := w.Daemon == answers && w.Server == faulty && !w.Foreign && !w.Unmounted && w.Record.Started
	if d.Action == Stop && isFaulty && w.Clients > 0 && w.Pace.Faulty != longAgo {
		return d, 1, errors.New("clients of a faulty server have no time to end")
	}
	delayed := w.Pace.Next == soon && !w.Calling && o.Goal == Running
	if (d.Action == Start || d.Action == StartServer && !w.Pace.Asked) && delayed {
		return d, 1, errors.New("a start that was put off")
	}
	if lost := int8(d.Record.Losses) - w.Record.Losses; lost > 0 {
		if !w.Harmed && w.isWell() && o.Goal == Running && lost == 1 && w.Clients > 0 {
			return d, 1, errors.New("a loss is counted although nothing is lost")
		}
		w.Harmed = false
	}
	w.remember(&d.Record)
	w.rememberPace(&d.Pace)
	w.Record.Losses = 0 // how many there were does not matter
	w.Record.Kills = 0
	effects = 1
	for _, effect := range w.effects(d.Action) {
		if effects == cut {
			w.crash()
			return d, effects + 1, nil
		}
		if err := effect(); err != nil {
			return d, effects, err
		}
		effects++
	}
	if d.Action == Rest && d.Phase == mps.Running {
		err = w.checkRunning()
	}
	if d.Action == Rest && !d.Wrong && !d.Delayed {
		w.Calling = false
	}
	return d, effects, err
}

// checkRunning asserts what must be true of a session that is said to run.
func (w *world) checkRunning() error {
	switch {
	case w.Daemon != answers || w.Server != active:
		return errors.New("it is said to run and does not")
	case w.Limits != w.Wanted || w.Defaults != w.Wanted:
		return errors.New("it does not have its limits")
	case w.Harmed:
		return errors.New("a loss was not counted")
	case !w.Record.Serving || !w.Record.Started || w.Record.Server != w.ID:
		return errors.New("it runs and is not recorded")
	case w.Killed && !w.Record.ClientKilled:
		return errors.New("a client was killed, and that is not noted")
	case w.Record.Removing:
		return errors.New("it runs although it is to be removed")
	case w.Unmounted || w.Foreign:
		return errors.New("containers cannot reach the daemon")
	}
	return nil
}

// effects are what an action does, one after the other.
func (w *world) effects(action Action) []func() error {
	end := func() error {
		if w.isWell() && w.Clients > 0 && !w.Record.Removing {
			return errors.New("a session that is well is ended")
		}
		isStart := w.Pace.Started != never // it may take a minute, even if clients have come meanwhile
		if w.Daemon == silent && w.Server == active && w.Clients > 0 && !w.Unmounted && !w.Record.Removing && !isStart {
			return errors.New("a silent daemon is ended under its clients")
		}
		w.endDaemon()
		w.Ended = false
		w.Record.Daemon, w.Record.Sockets, w.Record.Server, w.Record.ClientKilled = false, false, -1, false
		return nil
	}
	set := func(change func()) func() error { return func() error { change(); return nil } }
	switch action {
	case Rest, Observe, Save, Terminate:
		return nil
	case Remove, Suspend:
		return []func() error{end, set(func() { w.Gone, w.Published, w.Unmounted = true, false, false })}
	case Start:
		return []func() error{end, set(func() { w.Unmounted, w.Published = false, false }), set(func() { w.Daemon = starting })}
	case Stop:
		return []func() error{end}
	case StartServer:
		return []func() error{
			set(func() { w.Defaults = w.Record.Limits }),
			set(func() { w.Published = true }),
			func() error {
				if w.Defaults == 0 {
					return errors.New("a server is started without limits")
				}
				if w.Server == none {
					w.Server, w.ID, w.Limits, w.Clients = initializing, (w.ID+1)%ids, w.Defaults, 0
				}
				return nil
			},
		}
	case Accept:
		return []func() error{set(w.limitNext), set(w.limit), set(func() {
			w.Record.Server, w.Record.Started, w.Record.Serving = w.ID, true, true
			w.Pace = paceState{Failures: w.Pace.Failures, Next: w.Pace.Next, Ready: justNow}
		})}
	case SetLimits:
		return []func() error{set(w.limitNext), set(w.limit)}
	case ChangeLimits:
		return []func() error{set(func() { w.Limits = w.Wanted }), set(func() { w.Defaults = w.Wanted }), set(func() { w.Record.Limits = w.Wanted })}
	case ReplaceServers:
		return []func() error{func() error {
			if w.Clients > 0 && !w.Restart {
				return errors.New("servers are replaced under clients")
			}
			harmed := w.Harmed
			w.endServer(none)
			w.Harmed = harmed // it was counted before
			return nil
		}}
	}
	return []func() error{func() error { return fmt.Errorf("nothing is known of action %d", action) }}
}

// limitNext sets the limits of the next server, and limit those of this one, where it does not have them.
func (w *world) limitNext() {
	if w.Limits != w.Record.Limits {
		w.Defaults = w.Record.Limits
	}
}

func (w *world) limit() { w.Limits = w.Record.Limits }

// crash kills the supervisor; another one begins.
func (w *world) crash() {
	w.Pace, w.Calling, w.Killed, w.Ended = paceState{Ready: justNow}, false, false, false
	w.Wanted = w.Record.Limits
}

// event is something that happens in the world. It returns false where it cannot.
type event struct {
	name string
	// trouble is what does not happen again and again.
	trouble bool
	do      func(w *world) bool
}

var events = []event{
	{"the daemon listens", false, func(w *world) bool { was := w.Daemon; w.Daemon = answers; return was == starting }},
	{"the server is ready", false, func(w *world) bool { was := w.Server; w.Server = active; return was == initializing }},
	{"the daemon notices", false, func(w *world) bool { was := w.Server; w.Server = none; return was == dead && w.Daemon == answers }},
	{"clients of the faulty server have ended", false, func(w *world) bool {
		was := w.Server
		w.Server, w.Clients = active, 0
		return was == faulty
	}},
	{"time passes", false, func(w *world) bool {
		before := w.Pace
		for _, t := range []*when{&w.Pace.Next, &w.Pace.Started, &w.Pace.Ready, &w.Pace.Silent, &w.Pace.Faulty, &w.Pace.Replaced, &w.Pace.Parent} {
			if *t != never {
				*t = longAgo
			}
		}
		return w.Pace != before
	}},
	{"a client connects", false, func(w *world) bool {
		can := w.Published && w.Daemon == answers && w.Server == active && w.Clients < 2 && !w.Foreign
		w.Clients++
		return can
	}},
	{"a client ends", false, func(w *world) bool { can := w.Clients > 0; w.Clients--; return can }},
	{"a client is killed", true, func(w *world) bool {
		can := w.Clients > 0 && w.Server == active
		w.Clients--
		w.Killed = true
		return can
	}},
	{"the server is killed", true, func(w *world) bool { can := w.Server != none && w.Server != dead; w.endServer(dead); return can }},
	{"the server has a fault", true, func(w *world) bool {
		can := w.Server == active && w.Clients > 0
		w.Server = faulty
		return can
	}},
	{"the daemon is killed", true, func(w *world) bool { can := w.Daemon != absent; w.endDaemon(); w.Ended = true; return can }},
	{"the daemon stops to answer", true, func(w *world) bool { can := w.Daemon == answers; w.Daemon = silent; return can }},
	{"the daemon answers again", false, func(w *world) bool { can := w.Daemon == silent; w.Daemon = answers; return can }},
	{"somebody replaces a socket", true, func(w *world) bool { can := w.Daemon == answers && !w.Foreign; w.Foreign = true; return can }},
	{"somebody unmounts", true, func(w *world) bool { can := w.Daemon != absent && !w.Unmounted; w.Unmounted = true; return can }},
	{"somebody changes limits", true, func(w *world) bool { can := w.Server == active && w.Limits != 3; w.Limits = 3; return can }},
	{"the supervisor is killed", true, func(w *world) bool { w.crash(); return true }},
	{"a caller wants other limits", true, func(w *world) bool {
		w.Wanted, w.Calling = 3-w.Record.Limits, true
		return w.Record.Started && !w.Record.Removing
	}},
	{"a caller removes it", true, func(w *world) bool { can := !w.Record.Removing; w.Record.Removing = true; return can }},
}

// settle lets the supervisor work while nothing bad happens any more. The session runs in the end, or is gone.
func (w world) settle(m mutant) error {
	const most = 60
	var last []string
	for range most {
		d, _, err := w.step(m, -1)
		last = append(last, fmt.Sprintf("%d %s %s", d.Action, d.Phase, d.Message))
		switch {
		case err != nil:
			return err
		case w.Gone:
			if w.Daemon != absent || w.Server != none {
				return errors.New("something is left of a session that is gone")
			}
			return nil
		case d.Action == Rest && d.Phase == mps.Running:
			return nil
		case d.Action != Rest && d.Action != Observe:
			continue
		}
		moved := false
		for _, e := range events[:5] {
			next := w
			if e.do(&next) {
				w, moved = next, true
				break
			}
		}
		// Neither the world nor the supervisor moves: somebody has stopped the daemon, and clients would lose their server.
		if !moved && w.Daemon == silent && w.Clients > 0 {
			w.Daemon = answers
		} else if !moved {
			return errors.New("the session does not come to rest")
		}
	}
	return fmt.Errorf("the session never comes to rest: %q", last[most-8:])
}

// explore goes through all that can happen, in all orders. It returns how many states there are, and the first promise that
// is broken with how it came to that.
func explore(m mutant, faults int8) (states int, path []string, err error) {
	type visit struct {
		from int
		by   string
	}
	var all []world
	var visits []visit
	seen := map[world]bool{}
	add := func(w world, from int, by string) {
		if !seen[w] {
			seen[w] = true
			all, visits = append(all, w), append(visits, visit{from, by})
		}
	}
	fail := func(i int, by string, err error) (int, []string, error) {
		path = []string{by}
		for ; i > 0; i = visits[i].from {
			path = append([]string{visits[i].by}, path...)
		}
		return len(all), path, err
	}
	for _, restart := range []bool{false, true} {
		add(world{Record: recordState{Server: -1, Limits: 1}, Wanted: 1, Calling: true, Restart: restart, Faults: faults}, 0, "")
	}
	for i := 0; i < len(all); i++ {
		if all[i].Gone {
			continue
		}
		if err := all[i].settle(m); err != nil {
			return fail(i, "nothing else happens", err)
		}
		next := all[i]
		d, effects, err := next.step(m, -1)
		if err != nil {
			return fail(i, fmt.Sprintf("step %d", d.Action), err)
		}
		add(next, i, fmt.Sprintf("step %d %s", d.Action, d.Message))
		if all[i].Faults > 0 {
			for cut := range effects {
				next := all[i]
				next.Faults--
				d, _, _ := next.step(m, cut)
				add(next, i, fmt.Sprintf("step %d, killed after %d", d.Action, cut))
			}
		}
		for _, e := range events {
			next := all[i]
			if e.trouble {
				next.Faults--
			}
			if next.Faults >= 0 && e.do(&next) {
				add(next, i, e.name)
			}
		}
	}
	return len(all), nil, nil
}

var troubles = flag.Int("model.troubles", 2, "how many troubles there are in the model at most")

// TestModel drives the rules through all orders of events, with up to two troubles; make test-model has three.
func TestModel(t *testing.T) {
	t.Parallel()
	states, path, err := explore(mutant{}, int8(*troubles))
	t.Logf("enumerations: %d cases: states of a session", states)
	if err != nil {
		t.Errorf("%v, after:\n\t%s", err, strings.Join(path, "\n\t"))
	}
	if least := map[int]int{2: 100000, 3: 500000}[*troubles]; states < least {
		t.Errorf("%d states, want %d at least", states, least)
	}
}

// mutants are rules that are broken on purpose.
var mutants = map[string]mutant{
	"the end of a server is not seen":     {sees: func(o *Observation) { o.Gone = nil }},
	"the end of the daemon is no loss":    {sees: func(o *Observation) { o.Record.Serving = o.Record.Serving && o.Keeps }},
	"what was unmounted is not missed":    {sees: func(o *Observation) { o.Unmounted = nil }},
	"a foreign socket is believed":        {sees: func(o *Observation) { o.Replaced = "" }},
	"a dead server is taken for alive":    {sees: func(o *Observation) { setServers(o, func(s *Server) { s.Alive = true }) }},
	"limits are not compared":             {sees: func(o *Observation) { setServers(o, func(s *Server) { s.Unlimited = "" }) }},
	"a server is ready at once":           {sees: func(o *Observation) { setServers(o, func(s *Server) { s.State = control.StateActive }) }},
	"killed clients are not noticed":      {sees: func(o *Observation) { o.Killed = "" }},
	"killed clients do not matter":        {sees: func(o *Observation) { o.Record.ClientKilled, o.Record.Reported, o.Killed = "", false, "" }},
	"clients of the server do not count":  {sees: func(o *Observation) { o.Harmed = 0 }},
	"clients of a silent daemon are gone": {sees: func(o *Observation) { o.Harmed *= len(o.Servers) }},
	"a fault lasts too long at once":      {sees: func(o *Observation) { o.Pace.Faulty = longAgo.time() }},
	"starts are not put off":              {sees: func(o *Observation) { o.Pace.Next = never.time() }},
	"a removal is forgotten":              {sees: func(o *Observation) { o.Goal = Running }},
	"what is wanted does not matter":      {sees: func(o *Observation) { o.Wanted = o.Record.Spec }},
	"losses are not counted":              {says: func(o *Observation, d *Decision) { d.Record.Losses = o.Record.Losses }},
	"a loss is counted twice":             {says: func(o *Observation, d *Decision) { d.Record.Serving = o.Record.Serving }},
	"the first answer is enough":          {says: func(o *Observation, d *Decision) { d.Record.Sockets = o.Record.Sockets }},
	"servers are not accepted":            {says: skip(Accept)},
	"limits are not restored":             {says: skip(SetLimits)},
	"servers are not replaced":            {says: skip(ReplaceServers)},
	"a daemon is not given up":            {says: skip(Stop)},
}

func setServers(o *Observation, set func(s *Server)) {
	o.Servers = slices.Clone(o.Servers)
	for i := range o.Servers {
		set(&o.Servers[i])
	}
}

// skip does not do something, and says that all is well.
func skip(action Action) func(o *Observation, d *Decision) {
	return func(_ *Observation, d *Decision) {
		if d.Action == action {
			d.Action, d.Phase = Rest, mps.Running
		}
	}
}

// TestMutants shows that the model finds rules that are broken.
func TestMutants(t *testing.T) {
	t.Parallel()
	for name, m := range mutants {
		if states, _, err := explore(m, 2); err == nil {
			t.Errorf("%s: not found in %d states", name, states)
		} else {
			t.Logf("%s: %v (%d states)", name, err, states)
		}
	}
	t.Logf("enumerations: %d cases: broken rules", len(mutants))
}
