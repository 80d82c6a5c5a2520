// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
)

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
		if needsGPU(a.Do) && w.GPU[a.GPU].Health == hung {
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
