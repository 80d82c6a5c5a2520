// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import "fmt"

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
		if k := &w.Work[o]; o == g || k.Process == 0 || needsGPU(k.Queue[0].Do) && w.GPU[k.Queue[0].GPU].Health == hung {
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
