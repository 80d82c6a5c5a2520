// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"cmp"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
)

var kindNames = [...]string{
	"nothing", "record: started", "record: announced", "record: not started", "record: lost", "record: prepared", "record: sessions", "clear record",
	"clear unreadable record", "remove unreadable record", "write CDI spec", "remove CDI spec", "MIG mode on", "MIG mode off", "create GPU instance",
	"remove the CDI specs of others that name its ID", "create compute instance", "destroy compute instance", "destroy GPU instance",
	"compute mode EXCLUSIVE_PROCESS", "compute mode DEFAULT", "start MPS session", "stop MPS session", "set time slice", "reset time slice",
}

func kindName(kind rules.ActionKind) string { return kindNames[kind] }

// outcome is what became of an action.
type outcome uint8

const (
	done outcome = iota
	failed
	refused // definitely without effect
)

// violation is a promise that was broken, or nothing.
type violation string

// needsGPU reports whether an action calls the hardware.
func needsGPU(kind rules.ActionKind) bool { return kind >= rules.EnableMIG }

// act carries out one action. It asserts what must hold at that moment.
func (s *Scenario) act(w *world, k *work, a action) (outcome, violation) {
	if !needsGPU(a.Kind) {
		return s.actOnDisk(w, k, a)
	}
	gpu := &w.GPU[a.GPU]
	if gpu.Health == lost {
		return failed, ""
	}
	c := int(a.Claim)
	switch {
	case s.Fixed && (a.Kind == rules.EnableMIG || a.Kind == rules.DisableMIG):
		return done, "the MIG mode was switched where only an administrator may"
	case w.Away && (a.Kind == rules.StartSession || a.Kind == rules.StopSession):
		return failed, ""
	}
	switch a.Kind {
	case rules.EnableMIG:
		if gpu.Intruder == present && !gpu.MIG {
			if gpu.Enabled++; gpu.Enabled > 1 {
				return done, "MIG mode is switched on and off while somebody uses the GPU"
			}
		}
		gpu.MIG = true // succeeds under clients, on Hopper and later
	case rules.DisableMIG:
		if gpu.divided() {
			return refused, ""
		}
		gpu.MIG = false
	case rules.CreateGI:
		if !gpu.MIG || gpu.overlapping(a.Place) || s.busy(w, int(a.GPU), undivided) {
			return refused, ""
		}
		in := gpu.add(a.Place, int8(c), 0)
		s.noteID(k, a, in.ID)
	case rules.DropNamesakes:
		for o := range s.Claims {
			if s.doubtful(w, k, o, a) {
				w.Specs[o] = specState{}
			}
		}
	case rules.CreateCI:
		in := gpu.at(a.Place)
		if in == nil || in.Compute > 0 {
			return refused, ""
		}
		in.Compute = 1
		s.noteID(k, a, in.ID)
		for o := range s.Claims {
			if s.namesake(w, k, o, a) {
				return done, "the CDI spec of another claim names the id of the new partition"
			}
		}
	case rules.DestroyCI, rules.DestroyGI:
		return s.destroy(w, k, a)
	case rules.SetExclusive:
		if gpu.MIG {
			return failed, ""
		}
		if !gpu.Exclusive {
			gpu.Exclusive, gpu.ExclusiveBy = true, 1
		}
	case rules.SetDefault:
		if gpu.Exclusive && gpu.ExclusiveBy == stranger {
			return done, "the compute mode of an administrator was taken back"
		}
		if v := s.taken(w, a, func(p *device) bool { return p.Session != none && p.Place == undivided }); v != "" {
			return done, v
		}
		gpu.Exclusive, gpu.ExclusiveBy = false, 0
	case rules.StartSession:
		w.Sessions[a.Session-1] = a.Value
	case rules.StopSession:
		if v := s.taken(w, a, func(p *device) bool { return p.Session == a.Session }); v != "" {
			return done, v
		}
		w.Sessions[a.Session-1] = 0
	case rules.SetInterval:
		if s.sharedSlice(w, a) {
			return done, "the time slice of a prepared share was changed"
		}
		gpu.Slice, gpu.SliceBy, gpu.SliceLost = a.Value, 1, false
	case rules.ResetInterval:
		if gpu.SliceBy == stranger {
			return done, "the time slice of an administrator was reset"
		}
		for o := range s.Claims {
			if w.ready(o) && w.Records[o].Boot == w.Boot && s.any(o, a.GPU, func(i int, _ *device) bool { return w.Records[o].Slices[i] > 0 }) {
				return done, "reset time slice under a claim that is ready"
			}
		}
		gpu.Slice, gpu.SliceBy, gpu.SliceLost = 0, 0, false
	}
	return done, ""
}

// noteID notes the ID of an instance for all parts of the claim that are shares of it.
func (s *Scenario) noteID(k *work, a action, id int8) {
	s.on(int(a.Claim), a.GPU, func(i int, p *device) {
		if p.Place == a.Place && !p.Admin {
			k.IDs[i] = id
		}
	})
}

// noteGone notes that the place of a part is empty.
func (s *Scenario) noteGone(k *work, a action) {
	s.on(int(a.Claim), a.GPU, func(i int, p *device) {
		if p.Place == a.Place && !p.Admin {
			k.Destroyed |= 1 << i
		}
	})
}

// served reports whether an MPS server has a partition.
func (s *Scenario) served(w *world, g int, place place) bool {
	for c := range s.Claims {
		if s.any(c, int8(g), func(_ int, p *device) bool {
			return p.Place == place && p.Session != none && w.Sessions[p.Session-1] > 0
		}) {
			return true
		}
	}
	return false
}

// namesake reports whether the spec of a claim names the new instance of another one.
func (s *Scenario) namesake(w *world, k *work, o int, a action) bool {
	return o != int(a.Claim) && w.Specs[o].Exists && s.any(o, a.GPU, func(i int, p *device) bool {
		return w.Specs[o].IDs[i] == k.IDs[a.Part] && !p.SameDevice(s.partOf(&a))
	})
}

// doubtful reports whether the spec of another claim may name the new instance, as its record and the hardware show.
func (s *Scenario) doubtful(w *world, k *work, o int, a action) bool {
	r, gpu := &w.Records[o], &w.GPU[a.GPU]
	return o != int(a.Claim) && w.Specs[o].Exists && s.any(o, a.GPU, func(i int, p *device) bool {
		if p.Place == undivided || p.SameDevice(s.partOf(&a)) {
			return false
		}
		in := gpu.at(p.Place)
		return !r.Exists || r.Made[i] == k.IDs[a.Part] || in == nil || in.ID != r.Made[i]
	})
}

func (s *Scenario) destroy(w *world, k *work, a action) (outcome, violation) {
	gpu := &w.GPU[a.GPU]
	in := gpu.at(a.Place)
	switch {
	case in == nil || a.Kind == rules.DestroyCI && in.Compute == 0:
		if in == nil {
			s.noteGone(k, a)
		}
		return done, ""
	case s.busy(w, int(a.GPU), a.Place) || s.served(w, int(a.GPU), a.Place) || a.Kind == rules.DestroyGI && in.Compute > 0:
		return refused, ""
	case in.By == stranger && !in.Indistinct:
		return done, "a partition that somebody else made was destroyed"
	}
	if v := s.taken(w, a, func(p *device) bool { return p.Kind == ofClaims && p.Place == a.Place }); v != "" && in.By != stranger {
		return done, v
	}
	if spec := &w.Specs[a.Claim]; spec.Exists && s.any(int(a.Claim), a.GPU, func(i int, _ *device) bool { return spec.IDs[i] == in.ID }) {
		return done, "a partition is destroyed while a CDI spec names it"
	}
	if a.Kind == rules.DestroyCI {
		in.Compute = 0
		return done, ""
	}
	gpu.remove(a.Place)
	s.noteGone(k, a)
	return done, ""
}

// write asks the disk for space. What releases may use the reserve.
func (w *world) write(releases bool) bool {
	switch {
	case !w.Full:
		return true
	case releases && w.Reserve:
		w.Reserve = false
		return true
	}
	return false
}

func (s *Scenario) actOnDisk(w *world, k *work, a action) (outcome, violation) {
	c := int(a.Claim)
	r := &w.Records[c]
	switch a.Kind {
	case rules.RemoveSpec:
		if k.Stray && (r.Exists || w.calling(c, 0) > 0) {
			return done, "" // a call has the claim's lock, or has had it
		}
		v := s.takesSpec(w, c)
		w.Specs[c] = specState{}
		return done, v
	case rules.WriteSpec:
		return s.writeSpec(w, k, c)
	case rules.ClearGuard:
		w.Cleared[c] |= 1 << a.GPU
		for i := range s.Claims[c] {
			if w.Cleared[c]&(1<<s.Claims[c][i].GPU) == 0 {
				return done, ""
			}
		}
		s.dropGuard(w, k, c)
	case rules.DropGuard:
		s.dropGuard(w, k, c)
	case rules.Start, rules.Announce:
		if !w.write(false) {
			return failed, ""
		}
		if !r.Exists || r.Boot != w.Boot {
			*r = recordState{Exists: true, Phase: isPreparing, Boot: w.Boot, Arrived: max(k.Arrived, w.Guards[c])}
		}
		if a.Kind == rules.Announce {
			r.Marks[a.Part] = record.Announced
			break
		}
		r.Marks[a.Part], r.Slices[a.Part] = record.Started, a.Value
		r.Emptied &^= 1 << a.Part
		return done, s.overlap(w, k, c)
	case rules.Unstart:
		if !w.write(true) {
			return failed, ""
		}
		r.Marks[a.Part] = record.Untouched
	case rules.Clear:
		return s.clear(w, c, a.GPU), ""
	case rules.MarkLost:
		if !w.write(true) {
			return failed, ""
		}
		r.Marks[a.Part] = record.Lost
	case rules.MarkPrepared:
		if !w.write(false) {
			return failed, ""
		}
		v := cmp.Or(s.intruded(w, c), s.overbooked(w, c))
		r.Phase = isPrepared
		r.Arrived = max(r.Arrived, k.Arrived)
		for i := range s.Claims[c] {
			if p := &s.Claims[c][i]; p.Place != undivided {
				r.Made[i] = k.IDs[i]
			}
		}
		return done, v
	}
	return done, ""
}

// dropGuard removes what cannot be read of a claim.
func (s *Scenario) dropGuard(w *world, k *work, c int) {
	w.Guards[c], w.Cleared[c] = 0, 0
	if k.Process == 1 && s.Newer[c] {
		w.Records[c] = recordState{}
	}
}

// clear takes a GPU out of a record, which goes with the last one.
func (s *Scenario) clear(w *world, c int, g int8) outcome {
	r := &w.Records[c]
	rest := *r
	s.on(c, g, func(i int, _ *device) { rest.Marks[i] = record.Untouched })
	if rest.Marks == [maxParts]record.Mark{} || rest.Boot != w.Boot {
		*r = recordState{}
		return done // to remove a file needs no space
	}
	if !w.write(true) {
		return failed
	}
	*r = rest
	return done
}

func (s *Scenario) writeSpec(w *world, k *work, c int) (outcome, violation) {
	if !w.write(false) {
		return failed, ""
	}
	spec := specState{Exists: true, Boot: w.Boot}
	w.Specs[c] = spec
	for i := range s.Claims[c] {
		p := &s.Claims[c][i]
		if p.Place == undivided {
			w.Specs[c].IDs[i] = noInstance
			continue
		}
		id := k.IDs[i]
		w.Specs[c].IDs[i] = id
		if id == 0 {
			return done, "a CDI spec was written for a partition that was neither made nor seen"
		}
		in := w.GPU[p.GPU].byID(id)
		if in != nil && in.By != stranger && in.By != int8(c) && !s.shares(int(in.By), p) && !p.Admin {
			return done, "a CDI spec names the partition of another claim"
		}
		if in != nil && in.By == stranger && !in.Indistinct && !in.Unseen && p.Kind == ofClaims && !p.Admin {
			return done, "a CDI spec names the partition of somebody else"
		}
	}
	return done, ""
}

// giveUp ends a task because an action has failed.
func (w *world) giveUp(s *Scenario, g int) {
	// Who waits for a call that does not return has given up, and says nothing.
	if k := &w.Work[g]; needsGPU(k.Queue[0].Kind) && !k.Stuck {
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
	switch a.Kind {
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

// taken asserts that nothing is taken from claims that may count on it.
func (s *Scenario) taken(w *world, a action, uses func(*device) bool) violation {
	for c := range s.Claims {
		if w.ready(c) && w.Records[c].Boot == w.Boot && s.any(c, a.GPU, func(_ int, p *device) bool {
			isTaken := p.Kind == ofClaims && w.GPU[a.GPU].at(p.Place) == nil // by a stranger
			return !isTaken && !p.Admin && uses(p)
		}) {
			return violation(kindName(a.Kind) + " under a claim that is ready")
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
