// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"flag"
	"fmt"
	"hash/maphash"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
)

// shortRun is how many states of a scenario are visited where nothing else is said.
const shortRun = 8_000

var limit = flag.Int("model.states", shortRun, "how many states of a scenario to visit at most")

// TestScenarios explores the rules in every small world. Most have more states than are visited here, see make test-model.
func TestScenarios(t *testing.T) {
	all := Scenarios()
	if want := 53; len(all) != want {
		t.Errorf("%d scenarios, want %d", len(all), want)
	}
	states, transitions := 0, 0
	for _, s := range all {
		t.Run(s.Name, func(t *testing.T) {
			r := Explore(s, rules.Decide, *limit)
			t.Log(r)
			states, transitions = states+r.States, transitions+r.Transitions
			if r.Broken != "" {
				t.Fatalf("%s\n%s", r.Broken, r.Print())
			}
			checkStates(t, s, r)
		})
	}
	t.Logf("%d states, %d transitions", states, transitions)
}

// checkStates makes sure that an exploration has not stopped early: it visits as many states as it may, or all.
func checkStates(t *testing.T, s *Scenario, r Result) {
	t.Helper()
	switch {
	case s.States > 0 && s.States <= *limit:
		if r.States != s.States || !r.Complete {
			t.Errorf("visited %d states, complete=%t, of %d", r.States, r.Complete, s.States)
		}
	case r.Complete && r.States <= min(shortRun, *limit):
		t.Errorf("there are only %d states: note it as the scenario's number of States", r.States)
	case !r.Complete && r.States != *limit:
		t.Errorf("visited %d states of at most %d", r.States, *limit)
	}
}

var seed = maphash.MakeSeed()

func hash(w *world) uint64 { return maphash.Comparable(seed, *w) }

// Result is what an exploration has found.
type Result struct {
	States, Transitions, Settled, Frozen int
	// Indistinct is how many states have an instance that nothing tells apart from a claim's.
	Indistinct int
	Depth      int
	Time       time.Duration
	// Broken is the promise that is broken, with the shortest way there.
	Broken string
	Trace  []string
	// After is what the loops did from there, without another fault.
	After []string
	// Complete means that every state was visited.
	Complete bool
}

// PerSecond is how many states were explored in a second, with everything that is asserted in each.
func (r Result) PerSecond() float64 { return float64(r.States) / r.Time.Seconds() }

func (r Result) String() string {
	return fmt.Sprintf("%9d states %10d transitions %8d settled  depth %2d  %6.1f s %8.0f states/s  complete=%v  indistinct %d",
		r.States, r.Transitions, r.Settled+r.Frozen, r.Depth, r.Time.Seconds(), r.PerSecond(), r.Complete, r.Indistinct)
}

// node is a state in the order of discovery: its parent, and the number of the transition from there.
type node struct {
	parent int32
	step   int16
}

// Explore visits all states of a scenario, breadth first, up to a limit.
func Explore(s *Scenario, decide Decider, limit int) Result {
	began := time.Now()
	m := &machine{Scenario: s, decide: decide}
	start := s.start()
	seen := map[uint64]struct{}{hash(&start): {}}
	healed, frozen := map[uint64]bool{}, map[uint64]bool{}
	nodes := []node{{parent: -1}}
	frontier, ids := []world{start}, []int32{0}
	r := Result{States: 1, Complete: true}
	fail := func(id int32, v violation, last string) Result {
		r.Broken, r.Time = string(v), time.Since(began)
		r.Trace = m.trace(start, nodes, id)
		if last != "" {
			r.Trace = append(r.Trace, last)
		}
		return r
	}
	failAtRest := func(w world, id int32, v violation) Result {
		r := fail(id, v, "")
		m.note = func(l Label) { r.After = append(r.After, l.String()) }
		m.again = func() { r.After = nil }
		m.rest(w, nil, nil, &Result{})
		return r
	}
	for len(frontier) > 0 {
		var next []world
		var nextIDs []int32
		for i := range frontier {
			w, id := &frontier[i], ids[i]
			if v := m.rest(*w, healed, frozen, &r); v != "" {
				return failAtRest(*w, id, v)
			}
			var broken violation
			var last string
			step := int16(-1)
			m.successors(w, func(l Label, n *world, v violation) {
				step++
				r.Transitions++
				if broken != "" {
					return
				}
				if v != "" {
					broken, last = v, l.String()
					return
				}
				n.normal()
				h := hash(n)
				if _, known := seen[h]; known {
					return
				}
				if r.States >= limit {
					r.Complete = false
					return
				}
				seen[h] = struct{}{}
				r.States++
				nodes = append(nodes, node{id, step})
				next, nextIDs = append(next, *n), append(nextIDs, int32(len(nodes)-1))
			})
			if broken != "" {
				return fail(id, broken, last)
			}
		}
		frontier, ids = next, nextIDs
		r.Depth++
	}
	r.Time = time.Since(began)
	return r
}

// rest asserts that everything comes to rest from a state: once all faults are over, and while those
// that are there stay.
func (m *machine) rest(w world, healed, frozen map[uint64]bool, r *Result) violation {
	for g := range w.GPU {
		for i := range w.GPU[g].Instances {
			if w.GPU[g].Instances[i].Indistinct {
				r.Indistinct++
			}
		}
	}
	still := w
	m.freeze(&still)
	if end, v, known := m.quiet(still, frozen); v != "" {
		return "while faults stay: " + v
	} else if !known {
		r.Frozen++
		if v := m.atRest(&end, true); v != "" {
			return "while faults stay: " + v
		}
	}
	m.heal(&w)
	if m.again != nil {
		m.again()
	}
	end, v, known := m.quiet(w, healed)
	if v != "" {
		return "when all faults are over: " + v
	}
	if known {
		return ""
	}
	r.Settled++
	if v := m.atRest(&end, false); v != "" {
		return "when all faults are over: " + v
	}
	return ""
}

// trace says how a state was reached.
func (m *machine) trace(start world, nodes []node, id int32) []string {
	var steps []int16
	for ; nodes[id].parent >= 0; id = nodes[id].parent {
		steps = append(steps, nodes[id].step)
	}
	w := start
	var lines []string
	for i := len(steps) - 1; i >= 0; i-- {
		at := int16(-1)
		var chosen world
		var label Label
		m.successors(&w, func(l Label, n *world, _ violation) {
			if at++; at == steps[i] {
				chosen, label = *n, l
			}
		})
		chosen.normal()
		w = chosen
		lines = append(lines, label.String())
	}
	return lines
}

// Print shows a counterexample.
func (r Result) Print() string {
	var b strings.Builder
	for i, line := range r.Trace {
		fmt.Fprintf(&b, "  %2d. %s\n", i+1, line)
	}
	if len(r.After) > 0 {
		fmt.Fprintf(&b, "      no further fault:\n")
	}
	for i, line := range r.After {
		fmt.Fprintf(&b, "  %2d. %s\n", len(r.Trace)+i+1, line)
	}
	fmt.Fprintf(&b, "   => %s\n", r.Broken)
	return b.String()
}

// maxRounds is far more than any claim needs.
const maxRounds = 60

// heal stops all faults.
func (m *machine) heal(w *world) {
	w.Left = budget{}
	if w.Full {
		w.Full, w.Reserve = false, true
	}
	w.Away = false
	for g := range m.GPUs {
		w.GPU[g].Health = healthy
		w.GPU[g].intrude(nobody)
	}
	for c := range m.Claims {
		w.Claims[c].Stays = false
		if k := w.Claims[c].Kubelet; !w.Claims[c].Allocated && (k == wants || k == prepared || k == running) {
			w.end(c) // its pod was deleted
		}
	}
}

// freeze stops new faults. Those that are there stay.
func (m *machine) freeze(w *world) { w.Left = budget{} }

// round lets everything run once: tasks to their end, calls, and the loop of each GPU.
func (m *machine) round(w *world) violation {
	for i := range m.GPUs {
		if v := m.finish(w, i); v != "" {
			return v
		}
	}
	for c := range m.Claims {
		var v violation
		m.quietCalls(w, c, func(l Label, n *world, broken violation) {
			*w, v = *n, broken
			if m.note != nil {
				m.note(l)
			}
		})
		if v != "" {
			return v
		}
	}
	for g := range m.GPUs {
		for k := 0; ; k++ { // each task has its turn
			for p := int8(1); p <= int8(m.Processes); p++ {
				if w.Work[g].Process != 0 || w.locked(1<<g) {
					break
				}
				m.observe(at(w), p, g, &m.view)
				tasks := m.tasks(&m.view)
				if k >= len(tasks) {
					continue
				}
				if !m.begin(w, at(w), p, g, tasks[k]) {
					continue
				}
				if v := m.finish(w, g); v != "" {
					return v
				}
			}
			if k > 4 {
				break
			}
		}
	}
	w.normal()
	return ""
}

// finish carries out the rest of a task, unless it hangs.
func (m *machine) finish(w *world, g int) violation {
	for w.Work[g].Process != 0 {
		a := w.Work[g].Queue[0]
		if needsGPU(a.Kind) && w.GPU[a.GPU].Health == hung {
			if !w.Work[g].Stuck {
				w.stick(m.Scenario, g)
			}
			return ""
		}
		var l Label
		if v := m.perform(w, g, &l); v != "" {
			return v
		}
	}
	return ""
}

// quietCalls takes the next step of the calls for a claim.
func (m *machine) quietCalls(w *world, c int, apply emit) {
	moved := false
	once := func(l Label, n *world, v violation) {
		if !moved {
			moved = true
			apply(l, n, v)
		}
	}
	m.calls(w, c, once)
}

// quiet runs a copy of a state until nothing changes, and returns it.
func (m *machine) quiet(w world, seen map[uint64]bool) (world, violation, bool) {
	var path []uint64
	for range maxRounds {
		before := w
		h := hash(&before)
		if seen != nil && seen[h] {
			for _, p := range path {
				seen[p] = true
			}
			return w, "", true
		}
		path = append(path, h)
		if v := m.round(&w); v != "" {
			return w, v, false
		}
		if w == before && !w.forget() {
			if seen != nil {
				for _, p := range path {
					seen[p] = true
				}
			}
			return w, "", false
		}
	}
	return w, violation(fmt.Sprintf("the loops do not come to rest within %d rounds", maxRounds)), false
}

// forget ends the calls that the kubelet does not wait for, as their deadline does, and reports whether there were any.
func (w *world) forget() (any bool) {
	for c := range w.Calls {
		any = any || w.Calls[c][1].Process != 0
		w.Calls[c][1] = call{}
	}
	return any
}

// explained asserts that a claim that does not get on has a verdict that says why, in words.
func (m *machine) explained(w *world, c int) violation {
	process := w.Calls[c][0].Process
	for i := range m.Claims[c] {
		m.observe(at(w), process, int(m.Claims[c][i].GPU), &m.view)
		plan := m.decide(m.view)
		if v, found := plan.Verdict(claimNames[c]); found && v.Why != "" {
			return ""
		}
	}
	return violation(fmt.Sprintf("nothing says why claim %d does not get on", c))
}

// atRest asserts what must hold once everything is quiet. With frozen, GPUs may still not answer.
func (m *machine) atRest(w *world, frozen bool) violation {
	for g := range m.GPUs {
		if w.GPU[g].Health == healthy && w.locked(1<<g) {
			return violation(fmt.Sprintf("GPU %d answers, and a call on another one keeps its lock", g))
		}
		if v := m.intruderIsNamed(w, g); v != "" {
			return v
		}
	}
	for c := range m.Claims {
		k := &w.Claims[c]
		if m.blocked(w, c) && frozen {
			if w.Claims[c].Kubelet == ending && (w.Releases[c].Process == 0 || !w.Releases[c].Memory) {
				return violation(fmt.Sprintf("the pod of claim %d cannot end", c))
			}
			continue
		}
		switch k.Kubelet {
		case ending:
			if !frozen || !w.Releases[c].Memory {
				return violation(fmt.Sprintf("the pod of claim %d cannot end", c))
			}
		case wants:
			if !m.excused(w, c, frozen) {
				return violation(fmt.Sprintf("claim %d is wanted, nothing is in its way, and it does not become ready", c))
			}
			if v := m.explained(w, c); v != "" && !frozen {
				return v
			}
		case prepared, running:
			if v := m.hasItsDevices(w, c, frozen); v != "" {
				return v
			}
		case idle:
			if v := m.leftNothing(w, c, frozen); v != "" {
				return v
			}
		}
	}
	if frozen {
		return ""
	}
	return m.nothingLeaks(w)
}

// intruderIsNamed asserts that it is said who uses a GPU that no claim has.
func (m *machine) intruderIsNamed(w *world, g int) violation {
	if w.GPU[g].Intruder == nobody || w.GPU[g].Health != healthy || w.locked(1<<g) {
		return ""
	}
	m.observe(at(w), 1, g, &m.view)
	plan := m.decide(m.view)
	for _, s := range plan.Statements {
		if s.Reason == rules.UsedByOthers || s.Reason == rules.ReleasePending {
			return ""
		}
	}
	for c := range m.Claims {
		if w.Records[c].Phase == isPrepared && m.any(c, int8(g), func(i int, p *device) bool { return p.Place == undivided && w.Records[c].Marks[i] == record.Started }) {
			return ""
		}
	}
	return violation(fmt.Sprintf("nothing says that somebody uses GPU %d", g))
}

// hasItsDevices asserts that a claim that the kubelet believes to be prepared is, or has no spec.
func (m *machine) hasItsDevices(w *world, c int, frozen bool) violation {
	r, spec := &w.Records[c], &w.Specs[c]
	if w.Guards[c] > 0 || !w.Claims[c].Allocated || frozen && (w.Full || w.Away) {
		return ""
	}
	if !r.Exists || r.Phase != isPrepared {
		return violation(fmt.Sprintf("claim %d was prepared, and its record is gone", c))
	}
	whole := true
	for i := range m.Claims[c] {
		p := &m.Claims[c][i]
		if p.Place == undivided {
			whole = whole && (p.Session == none || p.Admin || w.Sessions[p.Session-1] >= p.Limit && w.GPU[p.GPU].Exclusive || w.GPU[p.GPU].divided())
			if slice := r.Slices[i]; slice > 0 && w.GPU[p.GPU].Slice != slice && !frozen {
				return violation(fmt.Sprintf("claim %d has lost its time slice", c))
			}
			continue
		}
		in := w.GPU[p.GPU].at(p.Place)
		there := in != nil && in.Compute == 1
		whole = whole && there
		if spec.Exists && (!there || spec.IDs[i] != in.ID) {
			return violation(fmt.Sprintf("the CDI spec of claim %d names a partition that is not there", c))
		}
		if spec.Exists && in.By == stranger && !in.Indistinct && p.Kind == ofClaims && !p.Admin {
			return violation(fmt.Sprintf("the CDI spec of claim %d names the partition of somebody else", c))
		}
		whole = whole && r.Marks[i] != record.Lost
	}
	if whole && !spec.Exists {
		return violation(fmt.Sprintf("claim %d has all its devices and no CDI spec", c))
	}
	return ""
}

// leftNothing asserts that a claim that was released has left nothing.
func (m *machine) leftNothing(w *world, c int, frozen bool) violation {
	if w.Guards[c] > 0 || frozen && (w.Full || w.Away || w.Claims[c].Stays) {
		return ""
	}
	for i := range m.Claims[c] {
		p := &m.Claims[c][i]
		if w.GPU[p.GPU].Intruder != nobody {
			return ""
		}
		for o := range m.Claims {
			// Who uses what is left is not for this claim to say.
			if o != c && frozen && w.holds(o) && m.any(o, p.GPU, func(_ int, q *device) bool { return q.Place == p.Place }) || w.Guards[o] > 0 && m.shares(o, p) {
				return ""
			}
		}
	}
	if w.Specs[c].Exists {
		return violation(fmt.Sprintf("claim %d was released and has left a CDI spec", c))
	}
	if w.Records[c].Exists {
		return violation(fmt.Sprintf("claim %d was released and has left a record", c))
	}
	return ""
}

// nothingLeaks asserts that there is nothing on the hardware that no claim has.
func (m *machine) nothingLeaks(w *world) violation {
	for c := range m.Claims {
		if w.Guards[c] > 0 {
			return "" // what it may be about stays, and is said
		}
	}
	for g := range m.GPUs {
		gpu := &w.GPU[g]
		for k := range gpu.Instances {
			in := &gpu.Instances[k]
			if in.there() && in.By != stranger && !m.wanted(w, g, func(p *device) bool { return p.Place == in.Place }) {
				return violation(fmt.Sprintf("an instance was leaked at %s of GPU %d", name(in.Place), g))
			}
		}
		if gpu.Exclusive && gpu.ExclusiveBy != stranger && !m.wanted(w, g, func(p *device) bool { return p.Session != none }) {
			return violation(fmt.Sprintf("GPU %d was left in EXCLUSIVE_PROCESS", g))
		}
		if gpu.Slice != 0 && gpu.SliceBy != stranger && !m.sliced(w, g) {
			return violation(fmt.Sprintf("the time slice of GPU %d was left", g))
		}
	}
	for id, limit := range w.Sessions {
		var most int8
		for g := range m.GPUs {
			for c := range m.Claims {
				if !w.Records[c].Exists || w.Claims[c].Kubelet == idle {
					continue
				}
				m.on(c, int8(g), func(_ int, p *device) {
					if p.Session == int8(id+1) {
						most = max(most, p.Limit)
					}
				})
			}
		}
		if limit > 0 && most == 0 {
			return violation(fmt.Sprintf("MPS session %d was left", id+1))
		}
		if limit > most {
			return violation(fmt.Sprintf("MPS session %d has a larger limit than its claims need", id+1))
		}
	}
	return ""
}

// normal makes states equal that differ only in the numbers of arrivals.
func (w *world) normal() {
	for c := range w.Claims {
		var used [10]*int8
		n := 0
		add := func(at *int8) {
			if *at > 0 {
				used[n] = at
				n++
			}
		}
		add(&w.Tombs[c])
		add(&w.Guards[c])
		add(&w.Records[c].Arrived)
		add(&w.Calls[c][0].Arrived)
		add(&w.Calls[c][1].Arrived)
		add(&w.Releases[c].Arrived)
		for g := range w.Work {
			if k := &w.Work[g]; k.Process != 0 && int(k.Queue[0].Claim) == c {
				add(&k.Arrived)
			}
		}
		rank, last := int8(0), int8(0)
		for {
			lowest := int8(127)
			for i := range n {
				if *used[i] > last && *used[i] < lowest {
					lowest = *used[i]
				}
			}
			if lowest == 127 {
				break
			}
			last = lowest
			rank++
			for i := range n {
				if *used[i] == lowest {
					*used[i] = rank
				}
			}
			if rank < lowest {
				last = lowest
			}
		}
		w.Claims[c].Clock = rank
	}
}

// blocked reports whether a claim has a part on a GPU that does not answer.
func (m *machine) blocked(w *world, c int) bool {
	for i := range m.Claims[c] {
		g := int(m.Claims[c][i].GPU)
		if w.GPU[g].Health != healthy {
			return true
		}
	}
	return false
}

// excused reports whether something that is not the plugin's to solve is in the way of a claim.
func (m *machine) excused(w *world, c int, frozen bool) bool {
	if frozen && (w.Full || w.Claims[c].Stays) { // also its own process of before has to end
		return true
	}
	for i := range m.Claims[c] {
		p := &m.Claims[c][i]
		g := &w.GPU[p.GPU]
		for k := range g.Instances {
			in := &g.Instances[k]
			if in.there() && in.By == stranger && in.Place.Overlaps(p.Place) {
				return true
			}
		}
		if p.Kind == ofStranger || p.Admin {
			if in := g.at(p.Place); p.Place != undivided && (in == nil || in.Compute == 0) {
				return true
			}
		}
		if g.Exclusive && g.ExclusiveBy == stranger || p.Fixed && (p.Kind == ofClaims) != g.MIG || frozen && w.Away && p.Session != none {
			return true
		}
		if g.Intruder != nobody || m.sharesTaken(w, c, p) {
			return true
		}
		for o := range m.Claims {
			if o == c || !m.has(o, p.GPU) {
				continue
			}
			if m.guards(w, o, p.GPU) || m.Newer[o] && w.Records[o].Exists || frozen && m.busyWith(w, o, p) ||
				frozen && w.Away && w.Records[o].Exists && m.any(o, p.GPU, func(_ int, q *device) bool { return q.Session != none }) {
				return true
			}
			lost := func(k int, q *device) bool { return p.SameDevice(q) && w.Records[o].Marks[k] == record.Lost }
			// The other one still has it, or has lost a share of it.
			if k := w.Claims[o].Kubelet; (k == prepared || k == running) && (m.conflicts(o, p) || m.any(o, p.GPU, lost)) {
				return true
			}
			// Two that the scheduler has given the same place, after a deletion by force.
			if w.Claims[o].Kubelet == wants && m.conflicts(o, p) {
				return true
			}
		}
	}
	return false
}

// guards reports whether something that a record which cannot be read may be about is on a GPU.
func (m *machine) guards(w *world, c int, g int8) bool {
	gpu := &w.GPU[g]
	isReleased := w.Tombs[c] > w.Guards[c] && !w.hasRecord(c)
	left := gpu.divided() || gpu.Exclusive || w.Away || m.busy(w, int(g), undivided)
	for id, limit := range w.Sessions {
		left = left || limit > 0 && m.sessionOn(int8(id+1), g)
	}
	return w.Guards[c] > 0 && (!isReleased || left)
}

// sharesTaken reports whether other claims have the shares that a claim wants, after a deletion by force.
func (m *machine) sharesTaken(w *world, c int, p *device) bool {
	taken := m.count(c, p)
	for o := range m.Claims {
		if k := w.Claims[o].Kubelet; o != c && (k == wants || k == prepared || k == running) {
			taken += m.count(o, p)
		}
	}
	return p.Clients > 0 && taken > int(p.Clients)
}

func (m *machine) busyWith(w *world, o int, p *device) bool {
	return w.holds(o) && m.any(o, p.GPU, func(_ int, q *device) bool { return q.Place.Overlaps(p.Place) })
}

// sliced reports whether a claim has the time slice of a GPU, as its record says: that of the first share.
func (m *machine) sliced(w *world, g int) bool {
	for c := range m.Claims {
		if w.Records[c].Exists && w.Claims[c].Kubelet != idle && m.any(c, int8(g), func(i int, _ *device) bool { return w.Records[c].Slices[i] > 0 }) {
			return true
		}
	}
	return false
}

func (m *machine) wanted(w *world, g int, what func(*device) bool) bool {
	for c := range m.Claims {
		if w.Records[c].Exists && w.Claims[c].Kubelet != idle && m.any(c, int8(g), func(_ int, p *device) bool { return !p.Admin && what(p) }) {
			return true
		}
	}
	return false
}
