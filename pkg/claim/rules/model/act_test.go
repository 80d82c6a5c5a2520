// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import "github.com/partage-dev/partage/pkg/claim/rules"

var doNames = [...]string{
	"nothing", "record: started", "record: not started", "record: lost", "record: prepared", "record: releasing", "clear record",
	"remove unreadable record", "write CDI spec", "remove CDI spec", "MIG mode on", "MIG mode off", "create GPU instance",
	"remove the CDI specs of others that name its ID", "create compute instance", "destroy compute instance", "destroy GPU instance",
	"compute mode EXCLUSIVE_PROCESS", "compute mode DEFAULT", "start MPS session", "stop MPS session", "set time slice", "reset time slice",
}

func doName(do rules.Do) string { return doNames[do] }

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
func needsGPU(do rules.Do) bool { return do >= rules.EnableMIG }

// act carries out one action. It asserts what must hold at that moment.
func (s *Scenario) act(w *world, k *work, a action) (outcome, violation) {
	if !needsGPU(a.Do) {
		return s.actOnDisk(w, k, a)
	}
	gpu := &w.GPU[a.GPU]
	if gpu.Health == lost {
		return failed, ""
	}
	c := int(a.Claim)
	switch {
	case s.Fixed && (a.Do == rules.EnableMIG || a.Do == rules.DisableMIG):
		return done, "the MIG mode was switched where only an administrator may"
	case w.Away && (a.Do == rules.StartSession || a.Do == rules.StopSession):
		return failed, ""
	}
	switch a.Do {
	case rules.EnableMIG:
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
		k.IDs[a.GPU] = in.ID
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
		k.IDs[a.GPU] = in.ID
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
		gpu.Slice, gpu.SliceBy = a.Value, 1
	case rules.ResetInterval:
		if gpu.SliceBy == stranger {
			return done, "the time slice of an administrator was reset"
		}
		for o := range s.Claims {
			if w.ready(o) && w.Records[o].Boot == w.Boot && w.Records[o].Slices[a.GPU] > 0 {
				return done, "reset time slice under a claim that is ready"
			}
		}
		gpu.Slice, gpu.SliceBy = 0, 0
	}
	return done, ""
}

// served reports whether an MPS server has a partition.
func (s *Scenario) served(w *world, g int, place place) bool {
	for c := range s.Claims {
		if p := s.part(c, int8(g)); p != nil && p.Place == place && p.Session != none && w.Sessions[p.Session-1] > 0 {
			return true
		}
	}
	return false
}

// namesake reports whether the spec of a claim names the new instance of another one.
func (s *Scenario) namesake(w *world, k *work, o int, a action) bool {
	p := s.part(o, a.GPU)
	return p != nil && o != int(a.Claim) && w.Specs[o].Exists && w.Specs[o].IDs[a.GPU] == k.IDs[a.GPU] && !s.sameDevice(o, int(a.Claim), a.GPU)
}

// doubtful reports whether the spec of another claim may name the new instance, as its record and the hardware show.
func (s *Scenario) doubtful(w *world, k *work, o int, a action) bool {
	p := s.part(o, a.GPU)
	if p == nil || o == int(a.Claim) || !w.Specs[o].Exists || p.Place == undivided || s.sameDevice(o, int(a.Claim), a.GPU) {
		return false
	}
	r, in := &w.Records[o], w.GPU[a.GPU].at(p.Place)
	return !r.Exists || r.Made[a.GPU] == k.IDs[a.GPU] || in == nil || in.ID != r.Made[a.GPU]
}

// taken asserts that nothing is taken from claims that may count on it.
func (s *Scenario) taken(w *world, a action, uses func(*device) bool) violation {
	for c := range s.Claims {
		p := s.part(c, a.GPU)
		if p == nil || p.Kind == rules.Partition && w.GPU[a.GPU].at(p.Place) == nil {
			continue // a stranger has taken it
		}
		if !p.Admin && uses(p) && w.ready(c) && w.Records[c].Boot == w.Boot {
			return violation(doName(a.Do) + " under a claim that is ready")
		}
	}
	return ""
}

// sharedSlice reports whether another claim that may count on it has a share of the GPU, with another time slice.
func (s *Scenario) sharedSlice(w *world, a action) bool {
	for c := range s.Claims {
		if p := s.part(c, a.GPU); p != nil && c != int(a.Claim) && p.Shared && w.ready(c) && w.Records[c].Slices[a.GPU] != a.Value {
			return true
		}
	}
	return false
}

func (s *Scenario) destroy(w *world, k *work, a action) (outcome, violation) {
	gpu := &w.GPU[a.GPU]
	in := gpu.at(a.Place)
	switch {
	case in == nil || a.Do == rules.DestroyCI && in.Compute == 0:
		k.Destroyed = k.Destroyed || in == nil
		return done, ""
	case s.busy(w, int(a.GPU), a.Place) || s.served(w, int(a.GPU), a.Place) || a.Do == rules.DestroyGI && in.Compute > 0:
		return refused, ""
	case in.By == stranger && !in.Indistinct:
		return done, "a partition that somebody else made was destroyed"
	}
	if v := s.taken(w, a, func(p *device) bool { return p.Kind == rules.Partition && p.Place == a.Place }); v != "" && in.By != stranger {
		return done, v
	}
	if spec := &w.Specs[a.Claim]; spec.Exists && spec.IDs[a.GPU] == in.ID {
		return done, "a partition is destroyed while a CDI spec names it"
	}
	if a.Do == rules.DestroyCI {
		in.Compute = 0
		return done, ""
	}
	gpu.remove(a.Place)
	k.Destroyed = true
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
	switch a.Do {
	case rules.RemoveSpec:
		w.Specs[c] = specState{}
	case rules.WriteSpec:
		return s.writeSpec(w, k, c)
	case rules.DropGuard:
		w.Guards[c] = 0
	case rules.Start:
		if !w.write(false) {
			return failed, ""
		}
		if !r.Exists || r.Boot != w.Boot {
			*r = recordState{Exists: true, Phase: rules.Preparing, Boot: w.Boot, Arrived: max(k.Arrived, w.Guards[c])}
		}
		r.Marks[a.GPU], r.Emptied, r.Slices[a.GPU] = rules.Started, false, a.Value
		return done, s.overlap(w, c)
	case rules.Unstart:
		if !w.write(true) {
			return failed, ""
		}
		r.Marks[a.GPU] = rules.Untouched
	case rules.Clear:
		return s.clear(w, c, a.GPU), ""
	case rules.MarkLost:
		if !w.write(true) {
			return failed, ""
		}
		r.Marks[a.GPU] = rules.Lost
	case rules.MarkReleasing:
		if !w.write(true) {
			return failed, ""
		}
		r.Phase = rules.Releasing
	case rules.MarkPrepared:
		if !w.write(false) {
			return failed, ""
		}
		r.Phase = rules.Prepared
		r.Arrived = max(r.Arrived, k.Arrived)
		for i := range s.Claims[c] {
			if p := &s.Claims[c][i]; p.Place != undivided {
				r.Made[p.GPU] = k.IDs[p.GPU]
			}
		}
	}
	return done, ""
}

// clear takes a GPU out of a record, which goes with the last one.
func (s *Scenario) clear(w *world, c int, g int8) outcome {
	r := &w.Records[c]
	rest := *r
	rest.Marks[g] = rules.Untouched
	if rest.Marks == [maxGPUs]rules.Mark{} || rest.Boot != w.Boot {
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
			w.Specs[c].IDs[p.GPU] = noInstance
			continue
		}
		id := k.IDs[p.GPU]
		w.Specs[c].IDs[p.GPU] = id
		if id == 0 {
			return done, "a CDI spec was written for a partition that was neither made nor seen"
		}
		in := w.GPU[p.GPU].byID(id)
		if in != nil && in.By != stranger && in.By != int8(c) && !s.sameDevice(int(in.By), c, p.GPU) && !p.Admin {
			return done, "a CDI spec names the partition of another claim"
		}
		if in != nil && in.By == stranger && !in.Indistinct && !in.Unseen && p.Kind == rules.Partition && !p.Admin {
			return done, "a CDI spec names the partition of somebody else"
		}
	}
	return done, ""
}

// overlap asserts that no two claims have begun with the same part of a GPU.
func (s *Scenario) overlap(w *world, c int) violation {
	for o := range s.Claims {
		if o == c || !w.Records[o].Exists || w.Records[o].Boot != w.Boot {
			continue
		}
		for i := range s.Claims[c] {
			p := &s.Claims[c][i]
			q := s.part(o, p.GPU)
			if q != nil && p.Conflicts(q) && w.Records[c].Marks[p.GPU] == rules.Started && w.Records[o].Marks[p.GPU] == rules.Started {
				return "two claims have begun with the same part of a GPU"
			}
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
			if q := s.part(o, p.GPU); o != c && q != nil && w.holds(o) && p.Conflicts(q) {
				return "a second owner: processes of another claim are still on the device"
			}
		}
		for id, limit := range w.Sessions {
			if limit > 0 && p.Place == undivided && p.Session != int8(id+1) && s.sessionOn(int8(id+1), p.GPU) {
				return "a container gets a GPU on which the MPS server of others still runs"
			}
		}
		if p.Place == undivided || p.Kind == rules.Static {
			continue
		}
		in := w.GPU[p.GPU].byID(w.Specs[c].IDs[p.GPU])
		if in != nil && in.Compute > 0 && in.By != stranger && in.By != int8(c) && !s.sameDevice(int(in.By), c, p.GPU) {
			return "a container gets the partition of another claim"
		}
	}
	return ""
}
