// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// The world is small, so that a state is a few hundred bytes: GPUs, claims and sessions are numbers. The rules get the
// observations that an engine would make of it.

// place is a MIG profile at a placement. The zero value is the undivided GPU.
type place struct{ Profile, Start, Size int8 }

var undivided = place{}

// Overlaps reports whether two places on one GPU have a part in common.
func (p place) Overlaps(q place) bool {
	return p == undivided || q == undivided || p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

func (p place) real() rules.Place {
	return rules.Place{ProfileID: uint32(p.Profile), Placement: gpu.Placement{Start: int(p.Start), Size: int(p.Size)}}
}

func compact(p rules.Place) place {
	return place{Profile: int8(p.ProfileID), Start: int8(p.Start), Size: int8(p.Size)}
}

const (
	// none is no session, noInstance what a spec names in place of an instance.
	none       int8 = 0
	noInstance int8 = -1
)

// device is what a claim has on one GPU.
type device struct {
	GPU    int8
	Kind   rules.Kind
	Place  place
	Shared bool
	Admin  bool
	// Fixed means that only an administrator changes the MIG mode.
	Fixed bool
	// Session is the MPS session that it is in, with the limit that the claim needs.
	Session int8
	Limit   int8
	// Own means that the session is the claim's own.
	Own bool
	// Slice is the time slice that the claim asked for, or 0.
	Slice int8
}

// SameDevice reports whether both are slots of one shared device.
func (p *device) SameDevice(q *device) bool {
	return p.Shared && q.Shared && p.Kind == q.Kind && p.Place == q.Place && p.Session == q.Session
}

// Conflicts reports whether two claims cannot have both.
func (p *device) Conflicts(q *device) bool {
	return !p.Admin && !q.Admin && p.Place.Overlaps(q.Place) && !p.SameDevice(q)
}

// action is one of package rules.
type action struct {
	Do      rules.Do
	Claim   int8
	GPU     int8
	Place   place
	Session int8
	// Value is a limit or a time slice.
	Value int8
}

// task is one of package rules.
type task struct {
	Claim   int8
	Aim     rules.Aim
	Actions []action
	Final   []action
	With    []int8
}

var (
	gpuNames     = [maxGPUs]string{"0000:1b:00.0", "0000:3b:00.0"}
	claimNames   = [maxClaims]types.UID{"claim-0", "claim-1", "claim-2"}
	sessionNames = [maxSessions]string{"session-1", "session-2"}
	intervals    = [...]policy.Interval{"", policy.IntervalShort, policy.IntervalMedium, policy.IntervalLong}
	boots        = [...]string{"", "boot-1", "boot-2", "boot-3"}
)

func index[T comparable](all []T, one T) int8 {
	for i := range all {
		if all[i] == one {
			return int8(i)
		}
	}
	return -1
}

func compactAction(a *rules.Action) action {
	c := action{Do: a.Do, Claim: index(claimNames[:], a.Claim), GPU: index(gpuNames[:], a.GPU), Place: compact(a.Place)}
	if a.Session != "" {
		c.Session = index(sessionNames[:], a.Session) + 1
	}
	switch a.Do {
	case rules.StartSession:
		c.Value = int8(a.Demand.Percent)
	case rules.SetInterval, rules.Start:
		c.Value = index(intervals[:], a.Interval)
	}
	return c
}

func compactTask(t *rules.Task) task {
	c := task{Claim: index(claimNames[:], t.Claim), Aim: t.Aim}
	for i := range t.Actions {
		c.Actions = append(c.Actions, compactAction(&t.Actions[i]))
	}
	for i := range t.Final {
		c.Final = append(c.Final, compactAction(&t.Final[i]))
	}
	for _, with := range t.With {
		c.With = append(c.With, index(gpuNames[:], with))
	}
	return c
}

// tasks decides, and returns what the world carries out.
func (m *machine) tasks(o *rules.Observation) []task {
	plan := m.decide(*o)
	tasks := make([]task, len(plan.Tasks))
	for i := range plan.Tasks {
		tasks[i] = compactTask(&plan.Tasks[i])
	}
	return tasks
}

// observe is what process p sees of a GPU.
func (s *Scenario) observe(w *world, p int8, g int, o *rules.Observation) {
	gpu := &w.GPU[g]
	*o = rules.Observation{
		GPU: gpuNames[g], Boot: boots[w.Boot], Now: time.Hour, Records: o.Records[:0], Guards: o.Guards[:0], Specs: o.Specs[:0],
		Hardware: rules.Hardware{Instances: o.Hardware.Instances[:0]}, Sessions: o.Sessions[:0],
	}
	h := &o.Hardware
	switch gpu.Health {
	case slow:
		h.Answer, h.Text = rules.Slow, "it is slow"
	case hung:
		h.Answer, h.Text = rules.Hung, "it hangs"
	case lost:
		h.Answer, h.Text = rules.Absent, "it is lost"
	default:
		s.observeHardware(w, g, o)
	}
	for c := range s.Claims {
		if s.part(c, int8(g)) == nil {
			continue
		}
		s.records(w, p, c, o)
		if w.Guards[c] > 0 {
			guard := rules.Guard{Claim: claimNames[c], Released: w.Tombs[c] > w.Guards[c], Path: "file", Remedy: "remove it"}
			for i := range s.Claims[c] {
				guard.GPUs = append(guard.GPUs, gpuNames[s.Claims[c][i].GPU])
			}
			o.Guards = append(o.Guards, guard)
		}
		if w.Specs[c].Exists {
			o.Specs = append(o.Specs, rules.Spec{Claim: claimNames[c]})
		}
	}
}

func (s *Scenario) observeHardware(w *world, g int, o *rules.Observation) {
	gpu, h := &w.GPU[g], &o.Hardware
	h.MIG, h.Exclusive = gpu.MIG, gpu.Exclusive
	h.Users = s.users(w, g, undivided)
	for i := range gpu.Instances {
		in := &gpu.Instances[i]
		if !in.there() {
			continue
		}
		h.Instances = append(h.Instances, rules.Instance{ID: int(in.ID), Place: in.Place.real(), Compute: int(in.Compute), Whole: in.Compute == 1, UUID: "MIG"})
		if users := s.users(w, g, in.Place); users.Any() {
			if h.InstanceUsers == nil {
				h.InstanceUsers = map[int]rules.Users{}
			}
			h.InstanceUsers[int(in.ID)] = users
		}
	}
	if w.Away {
		o.Supervisor, o.SupervisorText = rules.Failed, "it is away"
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

// users are the processes in a place that no record explains: those of claims that are prepared are theirs.
func (s *Scenario) users(w *world, g int, at place) rules.Users {
	for c := range s.Claims {
		p := s.part(c, int8(g))
		if p == nil || p.Admin || !w.holds(c) || p.Place != at {
			continue
		}
		r := &w.Records[c]
		if !r.Exists || r.Boot != w.Boot || r.Phase != rules.Prepared || w.releasing(c, 0) || !w.Claims[c].Allocated {
			return rules.Users{Memory: true, Text: "a process"}
		}
	}
	return rules.Users{}
}

func (s *Scenario) sessionOn(id, g int8) bool {
	for c := range s.Claims {
		if p := s.part(c, g); p != nil && p.Session == id {
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
		record := rules.Record{Claim: claimNames[c], Name: string(claimNames[c]), Boot: boots[r.Boot], Phase: r.Phase, Parts: s.parts(c, r)}
		any := w.calling(c, 0)
		record.Calling = any > 0
		record.Outdated = any > r.Arrived
		record.Orphan = !w.Claims[c].Allocated
		if w.releasing(c, p) {
			record.Phase = rules.Releasing
		}
		o.Records = append(o.Records, record)
		if record.Phase != rules.Releasing {
			return
		}
	}
	if own > 0 {
		o.Records = append(o.Records, rules.Record{
			Claim: claimNames[c], Name: string(claimNames[c]), Boot: boots[w.Boot], Phase: rules.Wanted, Calling: true, Parts: s.parts(c, &recordState{}),
		})
	}
}

func (s *Scenario) parts(c int, r *recordState) []rules.Part {
	parts := make([]rules.Part, len(s.Claims[c]))
	for i := range parts {
		d := &s.Claims[c][i]
		p := rules.Part{
			Key: "device-" + gpuNames[d.GPU], Device: deviceName(d), GPU: gpuNames[d.GPU], Kind: d.Kind, Place: d.Place.real(), Shared: d.Shared, Admin: d.Admin,
			Divisible: true, Dynamic: !d.Fixed, Own: d.Own, Interval: intervals[d.Slice], Mark: r.Marks[d.GPU], InstanceID: rules.NoInstance,
		}
		if p.Mark != rules.Untouched {
			p.Interval = intervals[r.Slices[d.GPU]]
		}
		p.Demand.Percent = int(d.Limit)
		if d.Session != none {
			p.Session = sessionNames[d.Session-1]
		}
		if d.Place != undivided && r.Made[d.GPU] > 0 {
			p.InstanceID = int(r.Made[d.GPU])
		}
		parts[i] = p
	}
	return parts
}

// deviceName is the same for shares of one device.
func deviceName(d *device) string {
	kind := "device"
	switch {
	case d.Session != none && d.Shared:
		kind = "mps"
	case d.Shared:
		kind = "timeslice"
	}
	return kind + "-" + gpuNames[d.GPU] + "-" + name(d.Place)
}
