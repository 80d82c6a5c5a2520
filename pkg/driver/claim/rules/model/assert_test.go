// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"github.com/partage-dev/partage/pkg/driver/claim/record"
)

// taken asserts that nothing is taken from claims that may count on it.
func (s *Scenario) taken(w *world, a action, uses func(*device) bool) violation {
	for c := range s.Claims {
		if w.ready(c) && w.Records[c].Boot == w.Boot && s.any(c, a.GPU, func(_ int, p *device) bool {
			isTaken := p.Kind == ofClaims && w.GPU[a.GPU].at(p.Place) == nil // by a stranger
			return !isTaken && !p.Admin && uses(p)
		}) {
			return violation(doName(a.Do) + " under a claim that is ready")
		}
	}
	return ""
}

// takesSpec asserts that the CDI spec of a claim that may count on it stays, as long as all that it names is there and
// written down.
func (s *Scenario) takesSpec(w *world, c int) violation {
	r, spec := &w.Records[c], &w.Specs[c]
	if !w.ready(c) || !spec.Exists || !r.Exists || r.Phase != isPrepared || r.Boot != w.Boot || w.releasing(c, 0) || w.Releases[c].Memory || !w.Claims[c].Allocated {
		return ""
	}
	for i := range s.Claims[c] {
		p := &s.Claims[c][i]
		in := w.GPU[p.GPU].at(p.Place)
		if r.Marks[i] == record.Lost || p.Place != undivided && (in == nil || in.Compute != 1 || in.ID != spec.IDs[i] || in.ID != r.Made[i] || in.By == stranger) {
			return ""
		}
	}
	return "the CDI spec of a claim that is ready was removed"
}

// intruded asserts that no claim is given a GPU that a process of nobody's claim was seen to have.
func (s *Scenario) intruded(w *world, c int) violation {
	if w.Records[c].Phase == isPrepared || w.Guards[c] > 0 {
		return ""
	}
	for i := range s.Claims[c] {
		p := &s.Claims[c][i]
		if p.Place != undivided || p.Admin || w.GPU[p.GPU].Intruder != present {
			continue
		}
		held := false
		for o := range s.Claims {
			held = held || o != c && w.Records[o].Exists && s.any(o, p.GPU, func(k int, q *device) bool { return p.SameDevice(q) && w.Records[o].Marks[k] == record.Started })
		}
		if !held {
			return "a claim gets a GPU that a process of no claim uses"
		}
	}
	return ""
}

// sharedSlice reports whether another claim that may count on it has a share of the GPU, with another time slice.
func (s *Scenario) sharedSlice(w *world, a action) bool {
	for c := range s.Claims {
		if c != int(a.Claim) && w.ready(c) && w.Records[c].Exists && s.any(c, a.GPU, func(i int, p *device) bool { return p.Shared && w.Records[c].Slices[i] != a.Value }) {
			return true
		}
	}
	return false
}

// overlap asserts that no two claims have begun with the same part of a GPU.
func (s *Scenario) overlap(w *world, k *work, c int) violation {
	for i := range s.Claims[c] {
		p := &s.Claims[c][i]
		if w.Records[c].Marks[i] != record.Started {
			continue
		}
		for o := range s.Claims {
			r := &w.Records[o]
			if o == c || !r.Exists || r.Boot != w.Boot || k.Process == 1 && s.Newer[o] && w.releasing(o, 0) {
				continue // the last cannot be read, and nothing of it is there
			}
			started := func(i int, q *device) bool { return p.Conflicts(q) && r.Marks[i] == record.Started }
			if s.any(o, p.GPU, started) {
				return "two claims have begun with the same part of a GPU"
			}
		}
	}
	return ""
}

// overbooked asserts that a claim that is about to be prepared gets no share that another one has, whoever began first.
func (s *Scenario) overbooked(w *world, c int) violation {
	if w.Records[c].Phase == isPrepared {
		return ""
	}
	for i := range s.Claims[c] {
		p := &s.Claims[c][i]
		taken := s.count(c, p)
		for o := range s.Claims {
			if r := &w.Records[o]; o != c && r.Exists && r.Boot == w.Boot && r.Phase == isPrepared && !w.releasing(o, 0) {
				taken += s.count(o, p)
			}
		}
		if p.Clients > 0 && taken > int(p.Clients) {
			return "more claims are prepared on a device than it has shares"
		}
	}
	return ""
}

// owner asserts that a claim gets what nobody else has.
func (s *Scenario) owner(w *world, c int) violation {
	for i := range s.Claims[c] {
		p := &s.Claims[c][i]
		if p.Admin {
			continue
		}
		for o := range s.Claims {
			if o != c && w.holds(o) && s.conflicts(o, p) {
				return "a second owner: processes of another claim are still on the device"
			}
		}
		for id, limit := range w.Sessions {
			if limit > 0 && p.Place == undivided && p.Session != int8(id+1) && s.sessionOn(int8(id+1), p.GPU) {
				return "a container gets a GPU on which the MPS server of others still runs"
			}
		}
		if p.Place == undivided || p.Kind == ofStranger {
			continue
		}
		in := w.GPU[p.GPU].byID(w.Specs[c].IDs[i])
		if in != nil && in.Compute > 0 && in.By != stranger && in.By != int8(c) && !s.shares(int(in.By), p) {
			return "a container gets the partition of another claim"
		}
	}
	return ""
}
