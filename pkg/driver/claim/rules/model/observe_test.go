// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"errors"

	kinds "github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	live "github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
)

// moments are when the parts of an observation were read: it is not taken at one moment.
type moments struct {
	// Records is also when calls and tombstones were read, Instances when modes were.
	Specs, Records, Instances, Sessions, Users *world
}

// at is an observation of one moment.
func at(w *world) moments { return moments{w, w, w, w, w} }

// between are the observations in the middle of which the world changes from one state to another. CDI specs come first.
func between(w, later *world) []moments {
	return []moments{{w, later, later, later, later}, {w, w, later, later, later}, {w, w, w, later, later}, {w, w, w, w, later}}
}

// Texts decide nothing.
var (
	errSlow    = errors.New("it is slow")
	errHung    = errors.New("it hangs")
	errLost    = errors.New("it is lost")
	errAway    = errors.New("it is away")
	errRefused = errors.New("the hardware has refused it")
)

// observe is what process p sees of a GPU.
func (s *Scenario) observe(w moments, p int8, g int, o *rules.Observation) {
	*o = rules.Observation{
		GPU: gpuNames[g], Boot: boots[w.Records.Boot], Records: o.Records[:0], Guards: o.Guards[:0], Specs: o.Specs[:0],
		Hardware: rules.Hardware{MIGState: gpu.MIGState{Instances: o.Hardware.Instances[:0]}}, Sessions: o.Sessions[:0],
	}
	h := &o.Hardware
	switch w.Instances.GPU[g].Health {
	case slow:
		h.Err = errSlow
	case hung:
		h.Err = errHung
	case lost:
		h.Err = errLost
	default:
		s.observeInstances(w.Instances, g, h)
		s.observeUsers(w.Users, w.Records, g, h)
		s.observeSessions(w.Sessions, g, o)
	}
	for c := range s.Claims {
		s.observeDisk(w.Records, p, g, c, o)
		// Also that of a claim elsewhere, if nothing explains it.
		if r := w.Records; w.Specs.Specs[c].Exists && (s.has(c, int8(g)) || !r.Records[c].Exists && r.Guards[c] == 0 && r.calling(c, p) == 0) {
			o.Specs = append(o.Specs, rules.Spec{Claim: claimNames[c]})
		}
	}
}

// observeDisk adds what the disk says of a claim, and what calls of this process want.
func (s *Scenario) observeDisk(w *world, p int8, g, c int, o *rules.Observation) {
	on := s.has(c, int8(g))
	unreadable := p == 1 && s.Newer[c] && w.Records[c].Exists
	if on && !unreadable {
		s.records(w, p, c, o)
	}
	written := w.Guards[c]
	if unreadable {
		written = w.Records[c].Arrived
	}
	if on && (unreadable || written > 0) && !w.cleared(c, int8(g)) {
		o.Guards = append(o.Guards, record.Guard{Claim: record.Ref{UID: claimNames[c]}, Released: w.Tombs[c] > written && (unreadable || !w.hasRecord(c)), Path: "file", Remedy: "remove it"})
	}
}

var compute = []gpu.ComputeInstance{{UUID: "MIG"}, {UUID: "MIG"}}

func (s *Scenario) observeInstances(w *world, g int, h *rules.Hardware) {
	there := &w.GPU[g]
	h.Enabled, h.Exclusive, h.IntervalLost = there.MIG, there.Exclusive, there.SliceLost
	for i := range there.Instances {
		if in := &there.Instances[i]; in.there() {
			place := in.Place.real()
			h.Instances = append(h.Instances, gpu.Instance{ID: int(in.ID), ProfileID: place.ProfileID, Placement: place.Placement, Compute: compute[:in.Compute]})
		}
	}
}

func (s *Scenario) observeSessions(w *world, g int, o *rules.Observation) {
	o.Shareable = true
	if w.Away {
		o.Unsupervised = errAway
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

// observeUsers finds the processes that no record explains, as the records were read.
func (s *Scenario) observeUsers(w, read *world, g int, h *rules.Hardware) {
	h.Users = s.users(w, read, g, undivided)
	if w.GPU[g].Intruder != nobody {
		h.Users = "a process of no claim"
	}
	gpu := &w.GPU[g]
	for i := range gpu.Instances {
		in := &gpu.Instances[i]
		if !in.there() {
			continue
		}
		if users := s.users(w, read, g, in.Place); users != "" {
			if h.InstanceUsers == nil {
				h.InstanceUsers = map[int]string{}
			}
			h.InstanceUsers[int(in.ID)] = users
		}
	}
}

// users are the processes in a place that no record explains: those of claims that are prepared are theirs.
func (s *Scenario) users(w, read *world, g int, at place) string {
	for c := range s.Claims {
		if !w.holds(c) || !s.any(c, int8(g), func(_ int, p *device) bool { return !p.Admin && p.Place == at }) {
			continue
		}
		r := &read.Records[c]
		if !r.Exists || r.Boot != read.Boot || r.Phase != isPrepared || read.releasing(c, 0) {
			return "a process"
		}
	}
	return ""
}

func (s *Scenario) sessionOn(id, g int8) bool {
	for c := range s.Claims {
		if s.any(c, g, func(_ int, p *device) bool { return p.Session == id }) {
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
		youngest := w.calling(c, 0)
		one := rules.Record{Record: s.recordOf(c, r), Calling: youngest > 0, Outdated: youngest > r.Arrived}
		if w.releasing(c, p) {
			one.State = record.Releasing
		}
		o.Records = append(o.Records, one)
		if one.State != record.Releasing {
			return
		}
	}
	if own > 0 {
		o.Records = append(o.Records, rules.Record{Record: s.recordOf(c, &recordState{Boot: w.Boot}), Wanted: true, Calling: true})
	}
}

func (s *Scenario) recordOf(c int, r *recordState) *record.Record {
	one := &record.Record{Claim: record.Ref{UID: claimNames[c]}, BootID: boots[r.Boot], State: states[r.Phase]}
	one.Devices = make([]record.Device, len(s.Claims[c]))
	for i := range one.Devices {
		d := &s.Claims[c][i]
		p := record.Device{
			Device: deviceName(d), ShareID: &partNames[i], PCIAddress: gpuNames[d.GPU], Type: typeOf(d), Admin: d.Admin, Clients: int(d.Clients),
			Divisible: true, DynamicMIG: !d.Fixed, Mark: r.Marks[i], Sharing: &record.Sharing{Interval: intervals[d.Slice]},
		}
		if p.Mark != record.Untouched {
			p.Sharing.Interval = intervals[r.Slices[i]]
		}
		p.Sharing.Limits.Percent = int(d.Limit)
		if d.Session != none {
			p.Sharing.Session = sessionNames[d.Session-1]
			one.Sessions = append(one.Sessions, record.Session{ID: p.Sharing.Session, Shared: !d.Own})
		}
		if d.Place != undivided {
			p.Partition = &record.Partition{Place: d.Place.real()}
			if r.Made[i] > 0 {
				p.Partition.Made = &live.Live{InstanceID: int(r.Made[i])}
			}
		}
		one.Devices[i] = p
	}
	return one
}

func typeOf(d *device) kinds.Kind {
	switch {
	case d.Shared && d.Session != none:
		return kinds.MPS
	case d.Shared:
		return kinds.TimeSlice
	case d.Kind == ofStranger:
		return record.Static
	case d.Kind == ofClaims:
		return kinds.Partition
	}
	return kinds.Whole
}
