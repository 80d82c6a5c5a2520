// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"errors"
	"fmt"
	"strings"

	kinds "github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
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
		fmt.Fprintf(&b, ": %s", kindName(l.Action.Kind))
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
	if needsGPU(a.Kind) && w.GPU[a.GPU].Health == hung {
		return // it does not return
	}
	next := *w
	v := m.perform(&next, g, &label)
	emit(label, &next, v)
	if w.Left.Fail > 0 && a.Kind != rules.RemoveSpec {
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
		for k.N > 0 && k.Queue[0].Kind == rules.DestroyGI && k.Destroyed.has(k.Queue[0].Part) {
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
	return k.Release && k.N > 1 && k.Queue[1].Kind == rules.Clear && (a.Kind == rules.StartSession || a.Kind == rules.DisableMIG)
}

// decideRefused looks again under the same lock, with the refusal in view.
func (m *machine) decideRefused(w *world, g int, a action) {
	k := w.Work[g]
	if k.Locks == 1<<g && (a.Kind == rules.CreateGI || a.Kind == rules.CreateCI || a.Kind == rules.DisableMIG) {
		m.observe(at(w), k.Process, g, &m.view)
		m.view.Refused = m.refusal(w, a)
		for _, t := range m.tasks(&m.view) {
			if t.Claim != a.Claim || len(t.Actions) == 0 {
				continue
			}
			if last := t.Actions[len(t.Actions)-1].Kind; last == rules.Unstart || last == rules.MarkLost {
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
		Action: rules.Action{Kind: a.Kind, Claim: claimNames[a.Claim], GPU: gpuNames[a.GPU], Key: key, Place: a.Place.real()},
		Err:    err,
	}
}

// moments are when the parts of an observation were read: it is not taken at one moment.
type moments struct {
	// Records is also when calls and tombstones were read, Instances when modes were.
	Specs, Records, Instances, Sessions, Users *world
}

// at is an observation of one moment.
func at(w *world) moments { return moments{w, w, w, w, w} }

// between are the observations in the middle of which the world changes from one state to another. CDI specs come first.
func between(w, later *world) []moments {
	return []moments{{w, later, later, later, later}, {w, w, later, later, later}, {w, w, w, later, later}, {w, w, w, w, later}}
}

// Texts decide nothing.
var (
	errSlow    = errors.New("it is slow")
	errHung    = errors.New("it hangs")
	errLost    = errors.New("it is lost")
	errAway    = errors.New("it is away")
	errRefused = errors.New("the hardware has refused it")
)

// observe is what process p sees of a GPU.
func (s *Scenario) observe(w moments, p int8, g int, o *rules.Observation) {
	*o = rules.Observation{
		GPU: gpuNames[g], Boot: boots[w.Records.Boot], Records: o.Records[:0], Guards: o.Guards[:0], Specs: o.Specs[:0],
		Hardware: rules.Hardware{MIGState: gpu.MIGState{Instances: o.Hardware.Instances[:0]}}, Sessions: o.Sessions[:0],
	}
	h := &o.Hardware
	switch w.Instances.GPU[g].Health {
	case slow:
		h.Err = errSlow
	case hung:
		h.Err = errHung
	case lost:
		h.Err = errLost
	default:
		s.observeInstances(w.Instances, g, h)
		s.observeUsers(w.Users, w.Records, g, h)
		s.observeSessions(w.Sessions, g, o)
	}
	for c := range s.Claims {
		s.observeDisk(w.Records, p, g, c, o)
		// Also that of a claim elsewhere, if nothing explains it.
		if r := w.Records; w.Specs.Specs[c].Exists && (s.has(c, int8(g)) || !r.Records[c].Exists && r.Guards[c] == 0 && r.calling(c, p) == 0) {
			o.Specs = append(o.Specs, rules.Spec{Claim: claimNames[c]})
		}
	}
}

// observeDisk adds what the disk says of a claim, and what calls of this process want.
func (s *Scenario) observeDisk(w *world, p int8, g, c int, o *rules.Observation) {
	on := s.has(c, int8(g))
	unreadable := p == 1 && s.Newer[c] && w.Records[c].Exists
	if on && !unreadable {
		s.records(w, p, c, o)
	}
	written := w.Guards[c]
	if unreadable {
		written = w.Records[c].Arrived
	}
	if on && (unreadable || written > 0) && !w.cleared(c, int8(g)) {
		o.Guards = append(o.Guards, record.Guard{Claim: record.Ref{UID: claimNames[c]}, Released: w.Tombs[c] > written && (unreadable || !w.hasRecord(c)), Path: "file", Remedy: "remove it"})
	}
}

var compute = []gpu.ComputeInstance{{UUID: "MIG"}, {UUID: "MIG"}}

func (s *Scenario) observeInstances(w *world, g int, h *rules.Hardware) {
	there := &w.GPU[g]
	h.Enabled, h.Exclusive, h.IntervalLost = there.MIG, there.Exclusive, there.SliceLost
	for i := range there.Instances {
		if in := &there.Instances[i]; in.there() {
			place := in.Place.real()
			h.Instances = append(h.Instances, gpu.Instance{ID: int(in.ID), ProfileID: place.ProfileID, Placement: place.Placement, Compute: compute[:in.Compute]})
		}
	}
}

func (s *Scenario) observeSessions(w *world, g int, o *rules.Observation) {
	o.Shareable = true
	if w.Away {
		o.Unsupervised = errAway
		return
	}
	for id, limit := range w.Sessions {
		if limit > 0 && s.sessionOn(int8(id+1), int8(g)) {
			one := rules.Session{ID: sessionNames[id], Running: true}
			one.Demand.Percent = int(limit)
			o.Sessions = append(o.Sessions, one)
		}
	}
}

// observeUsers finds the processes that no record explains, as the records were read.
func (s *Scenario) observeUsers(w, read *world, g int, h *rules.Hardware) {
	h.Users = s.users(w, read, g, undivided)
	if w.GPU[g].Intruder != nobody {
		h.Users = "a process of no claim"
	}
	gpu := &w.GPU[g]
	for i := range gpu.Instances {
		in := &gpu.Instances[i]
		if !in.there() {
			continue
		}
		if users := s.users(w, read, g, in.Place); users != "" {
			if h.InstanceUsers == nil {
				h.InstanceUsers = map[int]string{}
			}
			h.InstanceUsers[int(in.ID)] = users
		}
	}
}

// users are the processes in a place that no record explains: those of claims that are prepared are theirs.
func (s *Scenario) users(w, read *world, g int, at place) string {
	for c := range s.Claims {
		if !w.holds(c) || !s.any(c, int8(g), func(_ int, p *device) bool { return !p.Admin && p.Place == at }) {
			continue
		}
		r := &read.Records[c]
		if !r.Exists || r.Boot != read.Boot || r.Phase != isPrepared || read.releasing(c, 0) {
			return "a process"
		}
	}
	return ""
}

func (s *Scenario) sessionOn(id, g int8) bool {
	for c := range s.Claims {
		if s.any(c, g, func(_ int, p *device) bool { return p.Session == id }) {
			return true
		}
	}
	return false
}

// records adds what the disk says of a claim, and what calls of this process want.
func (s *Scenario) records(w *world, p int8, c int, o *rules.Observation) {
	r := &w.Records[c]
	own := w.calling(c, p)
	if r.Exists && (r.Boot == w.Boot || own == 0) {
		youngest := w.calling(c, 0)
		one := rules.Record{Record: s.recordOf(c, r), Calling: youngest > 0, Outdated: youngest > r.Arrived}
		if w.releasing(c, p) {
			one.State = record.Releasing
		}
		o.Records = append(o.Records, one)
		if one.State != record.Releasing {
			return
		}
	}
	if own > 0 {
		o.Records = append(o.Records, rules.Record{Record: s.recordOf(c, &recordState{Boot: w.Boot}), Wanted: true, Calling: true})
	}
}

func (s *Scenario) recordOf(c int, r *recordState) *record.Record {
	one := &record.Record{Claim: record.Ref{UID: claimNames[c]}, BootID: boots[r.Boot], State: states[r.Phase]}
	one.Devices = make([]record.Device, len(s.Claims[c]))
	for i := range one.Devices {
		d := &s.Claims[c][i]
		p := record.Device{
			Device: deviceName(d), ShareID: &partNames[i], PCIAddress: gpuNames[d.GPU], Type: typeOf(d), Admin: d.Admin, Clients: int(d.Clients),
			Divisible: true, DynamicMIG: !d.Fixed, Mark: r.Marks[i], Sharing: &record.Sharing{Interval: intervals[d.Slice]},
		}
		if p.Mark != record.Untouched {
			p.Sharing.Interval = intervals[r.Slices[i]]
		}
		p.Sharing.Limits.Percent = int(d.Limit)
		if d.Session != none {
			p.Sharing.Session = sessionNames[d.Session-1]
			one.Sessions = append(one.Sessions, record.Session{ID: p.Sharing.Session, Shared: !d.Own})
		}
		if d.Place != undivided {
			p.Partition = &record.Partition{Place: d.Place.real()}
			if r.Made[i] > 0 {
				p.Partition.Made = &gpu.PartitionID{InstanceID: int(r.Made[i])}
			}
		}
		one.Devices[i] = p
	}
	return one
}

func typeOf(d *device) kinds.Kind {
	switch {
	case d.Shared && d.Session != none:
		return kinds.MPS
	case d.Shared:
		return kinds.TimeSlice
	case d.Kind == ofStranger:
		return record.Static
	case d.Kind == ofClaims:
		return kinds.Partition
	}
	return kinds.Whole
}

// maxMeanwhile is more than a claim on another GPU takes to be prepared.
const maxMeanwhile = 14

// torn takes observations in the middle of which something else happens: one thing, or all that others have to do.
func (m *machine) torn(w *world, p int8, g int, emit emit) {
	locked := *w
	locked.Work[g] = work{Process: p, Locks: 1 << g, Observing: true}
	m.elsewhere(&locked, g, func(l Label, later *world, v violation) {
		if v == "" && later.Work[g] == locked.Work[g] && later.Boot == w.Boot {
			m.tornBetween(w, later, p, g, l.String(), emit)
		}
	})
	later := locked
	for n := range maxMeanwhile {
		if !m.goOn(&later, g) {
			return
		}
		if n > 0 { // the first step is one of those above
			m.tornBetween(w, &later, p, g, fmt.Sprintf("others go on by %d steps", n+1), emit)
		}
	}
}

func (m *machine) tornBetween(w, later *world, p int8, g int, what string, emit emit) {
	for i, when := range between(w, later) {
		m.observe(when, p, g, &m.view)
		for _, t := range m.tasks(&m.view) {
			next := *later
			next.Work[g] = work{}
			if m.begin(&next, when, p, g, t) {
				emit(Label{What: fmt.Sprintf("observe (%s, before reading %d)", what, i+1), Process: p, GPU: int8(g), Claim: t.Claim, Aim: t.Aim}, &next, "")
			}
		}
	}
}

// elsewhere is what can happen while a process has the lock of a GPU and observes it.
func (m *machine) elsewhere(w *world, g int, emit emit) {
	for o := range m.GPUs {
		if o != g && w.Work[o].Process != 0 {
			m.actSteps(w, o, emit)
		}
	}
	for c := range m.Claims {
		m.cluster(w, c, emit)
		m.calls(w, c, emit)
	}
	m.faults(w, emit)
}

// goOn takes the next step of what is at work on other GPUs, without any fault, and reports whether there was one.
func (m *machine) goOn(w *world, g int) bool {
	for o := range m.GPUs {
		if k := &w.Work[o]; o == g || k.Process == 0 || needsGPU(k.Queue[0].Kind) && w.GPU[k.Queue[0].GPU].Health == hung {
			continue
		}
		var l Label
		return m.perform(w, o, &l) == ""
	}
	for c := range m.Claims {
		moved := false
		before := w.Left
		m.quietCalls(w, c, func(_ Label, n *world, v violation) { *w, moved = *n, v == "" && n.Left == before })
		if moved {
			return true
		}
	}
	for o := range m.GPUs {
		for p := int8(1); p <= int8(m.Processes) && o != g && w.Work[o].Process == 0; p++ {
			m.observe(at(w), p, o, &m.view)
			for _, t := range m.tasks(&m.view) {
				if m.begin(w, at(w), p, o, t) {
					return true
				}
			}
		}
	}
	return false
}
