// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"strings"

	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
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

var aims = [...]string{"repair", "clear the guard of", "release", "make", "commit"}

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
	case strings.HasPrefix(l.What, "observe"):
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

// --- observe and decide ---

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
	m.observe(at(w), p, g, &m.view)
	for _, t := range m.tasks(&m.view) {
		next := *w
		if m.begin(&next, at(w), p, g, t) {
			emit(Label{What: "observe", Process: p, GPU: int8(g), Claim: t.Claim, Aim: t.Aim}, &next, "")
		}
	}
	if m.Torn {
		m.torn(w, p, g, emit)
	}
}

// ofOther returns what another GPU proposes with the same aim, or nothing, and whether it agrees. Where all of the claim is
// there it agrees that the claim is written again.
func (m *machine) ofOther(w *world, p, g int8, t *task) (proposed *task, agrees bool) {
	m.observe(at(w), p, int(g), &m.joint)
	plan := m.decide(m.joint)
	for i := range plan.Tasks {
		if other := compactTask(&plan.Tasks[i]); other.Claim == t.Claim && other.Aim == t.Aim && len(other.With) > 0 {
			return &other, true
		}
	}
	if t.Claim < 0 {
		return nil, w.GPU[g].Health == lost // a session ends without a GPU that is lost
	}
	v, _ := plan.Verdict(claimNames[t.Claim])
	return nil, v.State == rules.Complete && t.Aim == rules.Commit
}

// begin takes the locks of a task that was decided on an observation, and queues its actions.
func (m *machine) begin(w *world, seen moments, p int8, g int, t task) bool {
	locks := uint8(1) << g
	actions := t.Actions
	switch {
	case len(t.With) > 1:
		actions = nil
		for _, o := range t.With {
			other, agrees := &t, true
			if int(o) != g {
				other, agrees = m.ofOther(w, p, o, &t)
			}
			if !agrees || other != nil && int(o) < g {
				return false // the first GPU that proposes it speaks for all
			}
			if other != nil {
				actions = append(actions, other.Actions...)
			}
			locks |= 1 << o
		}
		if w.locked(locks) {
			return false
		}
		actions = append(actions, t.Final...)
	default:
		actions = append(actions[:len(actions):len(actions)], t.Final...)
	}
	if len(actions) > maxQueue {
		panic(fmt.Sprintf("a task has %d actions", len(actions)))
	}
	for o := range m.GPUs {
		if locks&(1<<o) != 0 {
			w.seen(seen, o, o == g)
		}
	}
	k := work{Process: p, Locks: locks, Release: t.Aim == rules.Release}
	k.N = int8(copy(k.Queue[:], actions))
	if t.Claim >= 0 {
		k.Stray = !m.Hasty && t.Aim == rules.Repair && !seen.Records.Records[t.Claim].Exists
		k.Arrived = max(w.calling(int(t.Claim), p), w.calling(int(t.Claim), 0))
		for i := range m.Claims[t.Claim] {
			part := &m.Claims[t.Claim][i]
			when := w
			if int(part.GPU) == g {
				when = seen.Instances
			}
			if locks&(1<<part.GPU) == 0 || when.GPU[part.GPU].Health != healthy {
				continue
			}
			if in := when.GPU[part.GPU].at(part.Place); in != nil {
				k.IDs[i] = in.ID
			}
		}
	}
	w.Work[g] = k
	for i := range w.GPU[g].Instances {
		if in := &w.GPU[g].Instances[i]; in.Unseen && m.watched(w, g, in.Place) {
			in.Indistinct = false
		}
	}
	return true
}

// seen notes what an observation of a GPU has shown.
func (w *world) seen(when moments, g int, torn bool) {
	gpu := &w.GPU[g]
	instances, users := w, w
	if torn {
		instances, users = when.Instances, when.Users
	}
	for i := range gpu.Instances {
		if in := &gpu.Instances[i]; instances.GPU[g].at(in.Place) != nil {
			in.Unseen = false
		}
	}
	if gpu.Intruder == unseen && users.GPU[g].Intruder != nobody {
		gpu.Intruder = present
	}
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
		if k.mayFail(a) {
			next.Work[g].pop()
		} else {
			next.giveUp(m.Scenario, g)
		}
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
	case result == done || k.mayFail(a):
		if k.N == 1 && !k.Stuck {
			w.unsaid(m.Scenario, g)
		}
		k.pop()
		for k.N > 0 && k.Queue[0].Do == rules.DestroyGI && k.Destroyed.has(k.Queue[0].Part) {
			k.pop() // the instance was gone
		}
	case result == refused && !k.Stuck:
		m.decideRefused(w, g, a)
	default:
		w.giveUp(m.Scenario, g)
	}
	return v
}

// mayFail reports whether a release goes on when an action fails: that limits cannot be tightened, or that the mode stays,
// keeps no claim.
func (k *work) mayFail(a action) bool {
	return k.Release && k.N > 1 && k.Queue[1].Do == rules.Clear && (a.Do == rules.StartSession || a.Do == rules.DisableMIG)
}

// decideRefused looks again under the same lock, with the refusal in view.
func (m *machine) decideRefused(w *world, g int, a action) {
	k := w.Work[g]
	if k.Locks == 1<<g && (a.Do == rules.CreateGI || a.Do == rules.CreateCI || a.Do == rules.DisableMIG) {
		m.observe(at(w), k.Process, g, &m.view)
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
	w.unsaid(m.Scenario, g)
	w.Work[g] = work{}
}

// refusal is what the engine says of an action that had no effect.
func (m *machine) refusal(w *world, a action) *rules.Refusal {
	err := errRefused
	if m.busy(w, int(a.GPU), undivided) {
		err = gpu.ErrInUse
	}
	key := deviceName(m.partOf(&a)) + "-" + string(partNames[a.Part])
	return &rules.Refusal{
		Action: rules.Action{Do: a.Do, Claim: claimNames[a.Claim], GPU: gpuNames[a.GPU], Key: key, Place: a.Place.real()},
		Err:    err,
	}
}
