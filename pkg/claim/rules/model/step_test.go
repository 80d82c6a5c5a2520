// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/claim/rules"
)

// Label says what a transition was.
type Label struct {
	What    string
	Process int8
	Claim   int8
	GPU     int8
	Aim     rules.Aim
	Action  action
	Outcome outcome
}

var aims = [...]string{"make", "start", "commit", "disown", "drop the guard of", "release", "repair"}

func (l Label) String() string {
	var b strings.Builder
	if l.Process > 0 {
		fmt.Fprintf(&b, "plugin %d: ", l.Process)
	}
	b.WriteString(l.What)
	switch {
	case l.What == "act":
		fmt.Fprintf(&b, ": %s", doName(l.Action.Do))
		if l.Action.Claim >= 0 {
			fmt.Fprintf(&b, " (claim %d, GPU %d)", l.Action.Claim, l.Action.GPU)
		}
		switch l.Outcome {
		case failed:
			b.WriteString(" -> fails")
		case refused:
			b.WriteString(" -> refused by the hardware")
		}
		return b.String()
	case l.What == "observe":
		fmt.Fprintf(&b, " GPU %d, decide to %s", l.GPU, aims[l.Aim])
	case l.GPU >= 0:
		fmt.Fprintf(&b, " GPU %d", l.GPU)
	}
	if l.Claim >= 0 {
		fmt.Fprintf(&b, " claim %d", l.Claim)
	}
	return b.String()
}

// Decider is rules.Decide, or a broken copy of it.
type Decider func(rules.Observation) rules.Plan

// machine takes the steps of a scenario.
type machine struct {
	*Scenario
	decide Decider
	view   rules.Observation
	joint  rules.Observation
	// note receives what the loops do once faults are over, for traces.
	note func(Label)
	// again is called when they begin anew.
	again func()
}

// emit receives the states that follow.
type emit func(Label, *world, violation)

func on(what string, c, g int) Label { return Label{What: what, Claim: int8(c), GPU: int8(g)} }

// successors calls emit for every transition from w.
func (m *machine) successors(w *world, emit emit) {
	for g := range m.GPUs {
		if k := &w.Work[g]; k.Process != 0 {
			m.actSteps(w, g, emit)
		}
		for p := int8(1); p <= int8(m.Processes); p++ {
			m.observations(w, p, g, emit)
		}
	}
	for c := range m.Claims {
		m.cluster(w, c, emit)
		m.calls(w, c, emit)
	}
	m.faults(w, emit)
}

// --- look and decide ---

func (w *world) locked(locks uint8) bool {
	for g := range w.Work {
		if w.Work[g].Process != 0 && w.Work[g].Locks&locks != 0 {
			return true
		}
	}
	return false
}

func (m *machine) observations(w *world, p int8, g int, emit emit) {
	if w.Work[g].Process != 0 || w.locked(1<<g) {
		return
	}
	m.observe(w, p, g, &m.view)
	for _, t := range m.tasks(&m.view) {
		next := *w
		if m.begin(&next, p, g, t) {
			emit(Label{What: "observe", Process: p, GPU: int8(g), Claim: t.Claim, Aim: t.Aim}, &next, "")
		}
	}
}

// begin takes the locks of a task and queues its actions.
func (m *machine) begin(w *world, p int8, g int, t task) bool {
	locks := uint8(1) << g
	actions := t.Actions
	if len(t.With) > 1 {
		if g != int(t.With[0]) {
			return false // the first GPU of the claim speaks for all
		}
		proposed := []task{t}
		for _, o := range t.With[1:] {
			locks |= 1 << o
			m.observe(w, p, int(o), &m.joint)
			for _, other := range m.tasks(&m.joint) {
				if other.Claim == t.Claim && other.Aim == t.Aim {
					proposed = append(proposed, other)
				}
			}
		}
		if len(proposed) != len(t.With) || w.locked(locks) {
			return false
		}
		actions = nil
		for _, one := range proposed {
			actions = append(actions, one.Actions...)
		}
		actions = append(actions, t.Final...)
	} else {
		actions = append(actions[:len(actions):len(actions)], t.Final...)
	}
	for o := range m.GPUs {
		for i := range w.GPU[o].Instances {
			if locks&(1<<o) != 0 {
				w.GPU[o].Instances[i].Unseen = false
			}
		}
	}
	k := work{Process: p, Locks: locks, Release: t.Aim == rules.Release}
	k.N = int8(copy(k.Queue[:], actions))
	if t.Claim >= 0 {
		k.Arrived = max(w.calling(int(t.Claim), p), w.calling(int(t.Claim), 0))
		for i := range m.Claims[t.Claim] {
			part := &m.Claims[t.Claim][i]
			if locks&(1<<part.GPU) == 0 || w.GPU[part.GPU].Health != healthy {
				continue
			}
			if in := w.GPU[part.GPU].at(part.Place); in != nil {
				k.IDs[part.GPU] = in.ID
			}
		}
	}
	w.Work[g] = k
	return true
}

// --- act ---

func (k *work) pop() {
	copy(k.Queue[:], k.Queue[1:k.N])
	k.N--
	k.Queue[k.N] = action{}
	if k.N == 0 || k.Stuck {
		*k = work{}
	}
}

func (m *machine) actSteps(w *world, g int, emit emit) {
	k := &w.Work[g]
	a := k.Queue[0]
	label := Label{What: "act", Process: k.Process, Claim: a.Claim, GPU: a.GPU, Action: a}
	if needsGPU(a.Do) && w.GPU[a.GPU].Health == hung {
		return // it does not return
	}
	next := *w
	v := m.perform(&next, g, &label)
	emit(label, &next, v)
	if w.Left.Fail > 0 && a.Do != rules.RemoveSpec {
		next := *w
		next.Left.Fail--
		next.abandon(m.Scenario, g)
		label.Outcome = failed
		emit(label, &next, "")
	}
}

// perform carries out the next action of a task.
func (m *machine) perform(w *world, g int, label *Label) violation {
	k := &w.Work[g]
	a := k.Queue[0]
	result, v := m.act(w, k, a)
	label.Outcome = result
	if m.note != nil {
		m.note(Label{What: "act", Process: k.Process, Claim: a.Claim, GPU: a.GPU, Action: a, Outcome: result})
	}
	switch {
	case result == done || result != done && k.Release && k.N > 1 && k.Queue[1].Do == rules.Clear && (a.Do == rules.StartSession || a.Do == rules.DisableMIG):
		if k.N == 1 && !k.Stuck && k.Destroyed && a.Claim >= 0 && w.Records[a.Claim].Exists && w.Records[a.Claim].Marks[a.GPU] == rules.Started {
			w.Records[a.Claim].Emptied = true
		}
		k.pop() // that limits cannot be tightened keeps no claim
		if k.Destroyed && k.N > 0 && k.Queue[0].Do == rules.DestroyGI {
			k.pop() // the instance was gone
		}
	case result == refused && !k.Stuck:
		m.decideRefused(w, g, a)
	default:
		w.abandon(m.Scenario, g)
	}
	return v
}

// decideRefused looks again under the same lock, with the refusal in view.
func (m *machine) decideRefused(w *world, g int, a action) {
	k := w.Work[g]
	if k.Locks == 1<<g && (a.Do == rules.CreateGI || a.Do == rules.CreateCI || a.Do == rules.DisableMIG) {
		m.observe(w, k.Process, g, &m.view)
		m.view.Refused = m.refusal(w, a)
		for _, t := range m.tasks(&m.view) {
			if t.Claim != a.Claim || len(t.Actions) == 0 {
				continue
			}
			if last := t.Actions[len(t.Actions)-1].Do; last == rules.Unstart || last == rules.MarkLost {
				k.Queue = [maxQueue]action{}
				k.N = int8(copy(k.Queue[:], t.Actions))
				w.Work[g] = k
				return
			}
		}
	}
	w.Work[g] = work{}
}

// refusal is what the engine says of an action that had no effect.
func (m *machine) refusal(w *world, a action) *rules.Refusal {
	return &rules.Refusal{
		Action: rules.Action{Do: a.Do, Claim: claimNames[a.Claim], GPU: gpuNames[a.GPU], Key: "device-" + gpuNames[a.GPU], Place: a.Place.real()},
		InUse:  m.busy(w, int(a.GPU), undivided), Text: "the hardware has refused it",
	}
}

// abandon ends a task before its end. What it alone knew is lost: a partition that somebody made
// meanwhile, in the place of a record that has begun, cannot be told apart from the claim's any more.
func (w *world) abandon(s *Scenario, g int) {
	k := w.Work[g]
	w.Work[g] = work{}
	for _, a := range k.Queue[:k.N] {
		if k.knows(a) {
			w.confuse(s, a)
		}
	}
}

// knows reports whether an action that is not done yet shows what a record does not say: that nothing
// of the claim is in the place.
func (k *work) knows(a action) bool {
	switch a.Do {
	case rules.CreateGI, rules.Unstart, rules.MarkLost:
		return true
	case rules.Clear:
		return k.Destroyed
	}
	return false
}

func (w *world) confuse(s *Scenario, a action) {
	if a.Claim < 0 || s.part(int(a.Claim), a.GPU) == nil {
		return
	}
	in := w.GPU[a.GPU].at(s.part(int(a.Claim), a.GPU).Place)
	if in != nil && in.By == stranger && s.startedAt(w, int(a.GPU), in.Place) {
		in.Indistinct = true
	}
}

// startedAt reports whether a record has begun with a partition in a place.
func (s *Scenario) startedAt(w *world, g int, place place) bool {
	for c := range s.Claims {
		p := s.part(c, int8(g))
		if p == nil || p.Place != place || p.Kind != rules.Partition {
			continue
		}
		if r := &w.Records[c]; r.Exists && r.Boot == w.Boot && r.Marks[g] == rules.Started && !r.Emptied || w.Guards[c] > 0 {
			return true
		}
	}
	return false
}

// watched reports whether a task that is at work knows that nothing of a claim is in a place.
func (s *Scenario) watched(w *world, g int, place place) bool {
	for i := range w.Work {
		k := &w.Work[i]
		for _, a := range k.Queue[:k.N] {
			if a.GPU == int8(g) && a.Claim >= 0 && s.part(int(a.Claim), a.GPU).Place == place && k.knows(a) {
				return true
			}
		}
	}
	return false
}

// --- the cluster ---

func (m *machine) cluster(w *world, c int, emit emit) {
	k := &w.Claims[c]
	step := func(what string, change func(n *world)) {
		next := *w
		change(&next)
		emit(on(what, c, -1), &next, "")
	}
	if !k.Allocated && k.Kubelet == idle && w.Left.Rounds[c] > 0 && m.free(w, c) {
		step("scheduler: allocates", func(n *world) {
			n.Left.Rounds[c]--
			n.Claims[c].Allocated, n.Claims[c].Kubelet = true, wants
		})
	}
	if k.Kubelet == prepared && k.Allocated && w.Specs[c].Exists && m.startable(w, c) {
		next := *w
		next.Claims[c].Kubelet = running
		emit(on("kubelet: starts the container of", c, -1), &next, m.owner(w, c))
	}
	if k.Kubelet == prepared && w.Left.Again > 0 {
		step("kubelet: was restarted, prepares again", func(n *world) { n.Left.Again--; n.Claims[c].Kubelet = wants })
	}
	if k.Kubelet == wants || k.Kubelet == prepared || k.Kubelet == running {
		step("kubelet: the pod ends of", func(n *world) { n.end(c) })
		if k.Kubelet == running && w.Left.Stays > 0 {
			step("kubelet: the pod ends, and a process stays, of", func(n *world) { n.Left.Stays--; n.end(c); n.Claims[c].Stays = true })
		}
		if k.Allocated && w.Left.Force > 0 {
			step("user: deletes by force the pod of", func(n *world) { n.Left.Force--; n.Claims[c].Allocated = false })
		}
	}
	if k.Kubelet == ending && w.Releases[c].Process == 0 && w.Left.Orphan > 0 {
		step("kubelet: forgets", func(n *world) { n.Left.Orphan--; n.Claims[c].Kubelet, n.Claims[c].Allocated = idle, false })
	}
	if k.Kubelet == ending && k.Allocated && w.Releases[c].Process != 0 && !w.Releases[c].Late && w.Left.Again > 0 {
		step("kubelet: does not wait for Unprepare any more, another pod has", func(n *world) {
			n.Left.Again--
			n.Claims[c].Kubelet, n.Releases[c].Late = wants, true
		})
	}
	if k.Stays {
		step("the process that stayed ends, of", func(n *world) { n.Claims[c].Stays = false })
	}
}

// end stops the containers. A call that the kubelet waits for is forgotten.
func (w *world) end(c int) {
	w.Claims[c].Kubelet = ending
	if w.Calls[c][0].Process != 0 && w.Calls[c][1].Process == 0 {
		w.Calls[c][1] = w.Calls[c][0]
	}
	w.Calls[c][0] = call{}
}

func (m *machine) free(w *world, c int) bool {
	for o := range m.Claims {
		if o != c && w.Claims[o].Allocated && m.conflict(o, c) {
			return false
		}
	}
	return true
}

// startable reports whether the devices that the spec names exist.
func (m *machine) startable(w *world, c int) bool {
	for i := range m.Claims[c] {
		p := &m.Claims[c][i]
		if w.GPU[p.GPU].Health == lost || w.Specs[c].Boot != w.Boot {
			return false
		}
		if p.Place != undivided {
			if in := w.GPU[p.GPU].byID(w.Specs[c].IDs[p.GPU]); in == nil || in.Compute != 1 {
				return false
			}
		}
		if p.Session != none && w.Sessions[p.Session-1] == 0 {
			return false
		}
	}
	return true
}

// --- calls ---

func (m *machine) calls(w *world, c int, emit emit) {
	k := &w.Claims[c]
	step := func(what string, p int8, v violation, change func(n *world)) {
		next := *w
		change(&next)
		l := on(what, c, -1)
		l.Process = p
		emit(l, &next, v)
	}
	for p := int8(1); p <= int8(m.Processes); p++ {
		if k.Kubelet == wants && w.Calls[c][0].Process == 0 {
			step("Prepare arrives for", p, "", func(n *world) {
				n.Claims[c].Clock++
				n.Calls[c][0] = call{p, n.Claims[c].Clock}
			})
		}
		if k.Kubelet == ending && w.Releases[c].Process == 0 {
			step("Unprepare arrives for", p, "", func(n *world) {
				n.Claims[c].Clock++
				n.Releases[c] = release{Process: p, Arrived: n.Claims[c].Clock}
			})
		}
	}
	for slot, call := range w.Calls[c] {
		if call.Process == 0 {
			continue
		}
		switch {
		case call.Arrived <= w.Tombs[c]:
			step("Prepare is out of date for", call.Process, "", func(n *world) { n.Calls[c][slot].Process, n.Calls[c][slot].Arrived = 0, 0 })
		case m.isReady(w, c, call):
			v := violation("")
			if slot == 0 {
				v = m.owner(w, c)
			}
			step("Prepare succeeds for", call.Process, v, func(n *world) {
				n.Calls[c][slot].Process, n.Calls[c][slot].Arrived = 0, 0
				if slot == 0 {
					n.Claims[c].Kubelet = prepared
				}
			})
		case w.Left.Timeout > 0:
			step("Prepare gives up for", call.Process, "", func(n *world) {
				n.Left.Timeout--
				n.Calls[c][slot].Process, n.Calls[c][slot].Arrived = 0, 0
			})
		}
	}
	m.unprepare(w, c, step)
}

// isReady reports whether a Prepare may succeed now: its own task has come to its end, or everything was
// looked at and is there.
func (m *machine) isReady(w *world, c int, k call) bool {
	r, p := &w.Records[c], k.Process
	if !r.Exists || r.Phase != rules.Prepared || w.releasing(c, p) {
		return false
	}
	if r.Arrived == k.Arrived {
		return !slices.Contains(r.Marks[:], rules.Lost)
	}
	for i := range m.Claims[c] {
		m.observe(w, p, int(m.Claims[c][i].GPU), &m.view)
		plan := m.decide(m.view)
		if v, found := plan.Verdict(claimNames[c]); !found || v.State != rules.Complete {
			return false
		}
	}
	return true
}

func (m *machine) unprepare(w *world, c int, step func(string, int8, violation, func(*world))) {
	r := &w.Releases[c]
	if r.Process == 0 {
		return
	}
	switch r.Stage {
	case 0:
		step("Unprepare writes the tombstone of", r.Process, "", func(n *world) {
			n.Releases[c].Stage = 1
			if !n.write(true) {
				n.Releases[c].Memory = true
				return
			}
			n.Tombs[c] = max(n.Tombs[c], r.Arrived)
		})
	case 1:
		step("Unprepare removes the CDI spec of", r.Process, "", func(n *world) {
			n.Releases[c].Stage = 2
			if !n.Records[c].Exists || n.releasing(c, r.Process) {
				n.Specs[c] = specState{}
			}
		})
	case 2:
		if !r.Memory || !w.Records[c].Exists || !w.releasing(c, r.Process) {
			step("Unprepare succeeds for", r.Process, "", func(n *world) {
				n.Releases[c] = release{}
				if n.Claims[c].Kubelet == ending && !r.Late {
					n.Claims[c].Kubelet, n.Claims[c].Allocated = idle, false
				}
			})
		}
	}
}
