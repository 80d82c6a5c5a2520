// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"github.com/partage-dev/partage/pkg/driver/claim/record"
)

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
