// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
)

// giveUp ends a task because an action has failed.
func (w *world) giveUp(s *Scenario, g int) {
	// Who waits for a call that does not return has given up, and says nothing.
	if k := &w.Work[g]; needsGPU(k.Queue[0].Do) && !k.Stuck {
		w.unsaid(s, g)
	}
	w.abandon(s, g)
}

// unsaid notes which places a task has emptied without saying so in the record, although it could have.
func (w *world) unsaid(s *Scenario, g int) {
	k := &w.Work[g]
	c := k.Queue[0].Claim
	if c < 0 || !w.Records[c].Exists {
		return
	}
	for i := range s.Claims[c] {
		if k.Destroyed.has(int8(i)) && w.Records[c].Marks[i] == record.Started {
			w.Records[c].Emptied |= 1 << i
		}
	}
}

// abandon ends a task before its end. What it alone knew is lost: a partition that somebody made
// meanwhile, in the place of a record that has begun, cannot be told apart from the claim's any more.
func (w *world) abandon(s *Scenario, g int) {
	k := w.Work[g]
	w.Work[g] = work{}
	w.GPU[g].Enabled = 0 // the mode may be switched once more after each failure
	for _, a := range k.Queue[:k.N] {
		w.confuse(s, &k, a)
	}
}

// knows reports whether an action that is not done yet shows what a record does not say: that nothing
// of the claim is in the place.
func (k *work) knows(a action, i int8) bool {
	switch a.Do {
	case rules.CreateGI, rules.MarkLost:
		return a.Part == i
	case rules.Unstart:
		return a.Part == i && (!k.Release || k.Destroyed.has(i))
	case rules.Clear:
		return k.Destroyed.has(i)
	}
	return false
}

// knowsPlace reports whether an action that is not done yet shows that nothing of its claim is in a place.
func (s *Scenario) knowsPlace(k *work, a action, g int, place place) bool {
	return a.Claim >= 0 && s.any(int(a.Claim), int8(g), func(i int, p *device) bool { return p.Place == place && k.knows(a, int8(i)) })
}

func (w *world) confuse(s *Scenario, k *work, a action) {
	gpu := &w.GPU[a.GPU]
	for i := range gpu.Instances {
		in := &gpu.Instances[i]
		if in.there() && in.By == stranger && s.knowsPlace(k, a, int(a.GPU), in.Place) && s.startedAt(w, int(a.GPU), in.Place) {
			in.Indistinct = true
		}
	}
}

// startedAt reports whether a record has begun with a partition in a place.
func (s *Scenario) startedAt(w *world, g int, place place) bool {
	for c := range s.Claims {
		if s.any(c, int8(g), func(i int, p *device) bool {
			r := &w.Records[c]
			return p.Place == place && p.Kind == ofClaims && !p.Admin &&
				(r.Exists && r.Boot == w.Boot && r.Marks[i] == record.Started && !r.Emptied.has(int8(i)) || w.Guards[c] > 0)
		}) {
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
			if a.GPU == int8(g) && s.knowsPlace(k, a, g, place) {
				return true
			}
		}
	}
	return false
}
