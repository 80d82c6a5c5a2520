// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"slices"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
)

// --- the cluster ---

func (m *machine) cluster(w *world, c int, emit emit) {
	k := &w.Claims[c]
	step := func(what string, change func(n *world)) {
		next := *w
		change(&next)
		emit(on(what, c, -1), &next, "")
	}
	if !k.Allocated && k.Kubelet == idle && w.Left.Rounds[c] > 0 && m.free(w, c) && m.roomFor(w, c) {
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

// roomFor reports whether the scheduler finds shares for a claim.
func (m *machine) roomFor(w *world, c int) bool {
	for i := range m.Claims[c] {
		p := &m.Claims[c][i]
		taken := m.count(c, p)
		for o := range m.Claims {
			if o != c && w.Claims[o].Allocated {
				taken += m.count(o, p)
			}
		}
		if p.Clients > 0 && taken > int(p.Clients) {
			return false
		}
	}
	return true
}

// count is how many shares of a device a claim has.
func (s *Scenario) count(c int, p *device) (n int) {
	s.on(c, p.GPU, func(_ int, q *device) {
		if p.SameDevice(q) {
			n++
		}
	})
	return n
}

// startable reports whether the devices that the spec names exist.
func (m *machine) startable(w *world, c int) bool {
	for i := range m.Claims[c] {
		p := &m.Claims[c][i]
		if w.GPU[p.GPU].Health == lost || w.Specs[c].Boot != w.Boot {
			return false
		}
		if p.Place != undivided {
			if in := w.GPU[p.GPU].byID(w.Specs[c].IDs[i]); in == nil || in.Compute != 1 {
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
		if k.Kubelet == wants && w.Calls[c][0].Process == 0 && (p == 2 || !m.Newer[c]) {
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
	m.orphan(w, c, step)
}

// orphan releases a claim that the API server does not know, unless processes use it.
func (m *machine) orphan(w *world, c int, step func(string, int8, violation, func(*world))) {
	r := &w.Records[c]
	if w.Claims[c].Allocated || w.Releases[c].Process != 0 || !r.Exists || r.Phase != isPrepared || w.releasing(c, 0) {
		return
	}
	for p := int8(1); p <= int8(m.Processes); p++ {
		if p == 1 && m.Newer[c] || r.Boot == w.Boot && m.keeps(w, c) {
			continue
		}
		v := violation("")
		if w.holds(c) && slices.ContainsFunc(m.Claims[c], func(d device) bool { return m.isAlone(w, c, &d) }) {
			v = "a claim is released without the kubelet, and its processes are there"
		}
		step("the API server does not know", p, v, func(n *world) {
			n.Claims[c].Clock++
			n.Releases[c] = release{Process: p, Arrived: n.Claims[c].Clock, Late: true}
		})
	}
}

// isAlone reports whether a claim has a device that answers, and of which no other claim has a share.
func (m *machine) isAlone(w *world, c int, p *device) bool {
	for o := range m.Claims {
		if o != c && w.Records[o].Exists && m.shares(o, p) {
			return false
		}
	}
	return !p.Admin && w.GPU[p.GPU].Health == healthy
}

// keeps reports whether processes keep an orphan, or whether that is not known yet.
func (m *machine) keeps(w *world, c int) bool {
	for i := range m.Claims[c] {
		g := m.Claims[c][i].GPU
		switch w.GPU[g].Health {
		case hung, lost:
			continue
		case slow:
			return true
		case healthy:
		}
		if p := &m.Claims[c][i]; m.isAlone(w, c, p) && (w.holds(c) || p.Place == undivided && w.GPU[g].Intruder != nobody || m.users(w, w, int(g), p.Place) != "") {
			return true
		}
	}
	return false
}

// isReady reports whether a Prepare may succeed now: its own task has come to its end, or everything was
// looked at and is there.
func (m *machine) isReady(w *world, c int, k call) bool {
	r, p := &w.Records[c], k.Process
	if !r.Exists || r.Phase != isPrepared || w.releasing(c, p) {
		return false
	}
	if r.Arrived == k.Arrived {
		return !slices.Contains(r.Marks[:], record.Lost)
	}
	for i := range m.Claims[c] {
		m.observe(at(w), p, int(m.Claims[c][i].GPU), &m.view)
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
			n.Tombs[c], n.Cleared[c] = max(n.Tombs[c], r.Arrived), 0
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
