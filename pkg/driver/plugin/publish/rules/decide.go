// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package rules decides which request about the ResourceSlices of a node is due first.
//
//	desire    Want: the slices that there should be, with the taints that hold now
//	observe   Stored: what the API server has, as far as is known
//	decide    Decide(Want, Stored, Memory, now) -> one request, and whether what is stored is right
//	act       carries out that request, takes the answer for what is stored, and asks again
//
// So there is no plan that could be out of date, and none that a crash interrupts. What is right does not depend on who changed what,
// or on what was written last: Memory only decides when to write. An empty one leads to the same slices, at other times. The tests explore the rules together with a cluster that goes wrong.
package rules

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Time is the time since some moment, the same one for a process.
type Time = time.Duration

const (
	// Never is the time of what has not happened, before everything.
	Never Time = -1 << 60
	// Forever comes after everything.
	Forever Time = 1 << 60
)

// Want is what there should be.
type Want struct {
	// Node is the name of the node and of its only pool, and Owner its UID.
	Node  string
	Owner types.UID
	// Slices have their names and contents: no owner, no generation and no count. Those with counters come first.
	Slices []*resourceapi.ResourceSlice
	// NoTaints means that the API server stores no taints: those that it has stay.
	NoTaints bool
	// MaxTaints is how many the API server takes of a device.
	MaxTaints int
}

// Stored is what the API server has, as far as is known.
type Stored struct {
	// Known is false as long as nothing was read.
	Known bool
	// Slices are all of the driver on the node, whatever their names.
	Slices []*resourceapi.ResourceSlice
}

// Verb is the verb of a request.
type Verb uint8

// The verbs.
const (
	List   Verb = iota + 1 // read what is stored
	Put                    // create the slice, or update it if it has a UID
	Delete                 // a slice as it is stored
)

// Request is one request to the API server.
type Request struct {
	Verb  Verb
	Slice *resourceapi.ResourceSlice
	// News is when the latest taint of the slice was wanted that keeps pods away.
	News Time
	// informs means that it has, or takes away, taints without effect.
	informs bool
	// spends means that it is of taints, and draws on the budget.
	spends bool
}

// Plan is the first request that is due, and how the stored slices differ from what is wanted.
type Plan struct {
	// Request is nil if nothing is due.
	Request *Request
	// Published means that the API server has what it should have, except for what can wait.
	Published bool
	// Missing and Wrong count the slices that are not there, or not as they should be. ChangedByOthers says that somebody else did that.
	Missing, Wrong  int
	ChangedByOthers bool
	// Next is when something becomes due although nothing changes, or Forever.
	Next Time
}

// grade is how a slice differs, in the order in which slices are written.
type grade uint8

const (
	same      grade = iota
	soft            // taints that can wait are due
	structure       // what is no taint, or the generation
	urgent          // a taint that keeps pods away is missing
)

// slot is one of the slices that there should be.
type slot struct {
	want, have *resourceapi.ResourceSlice // have is nil where there is none
	// target are the devices as they are written, if the slice is, and same means that they are stored, apart from taints.
	target []resourceapi.Device
	same   bool
	grade  grade
	news   Time
	// informs means that taints without effect differ.
	informs bool
}

type decision struct {
	*Want
	*Stored
	m         *Memory
	now, next Time

	slots []slot
	// strays are slices that should not be there.
	strays     []*resourceapi.ResourceSlice
	generation int64
}

// Decide says what is to be requested first. It changes nothing but the memory, which is for pace.
func Decide(want *Want, stored *Stored, m *Memory, now Time) Plan {
	d := decision{Want: want, Stored: stored, m: m, now: now, next: Forever}
	plan := d.plan()
	plan.Next = d.next
	return plan
}

// due reports whether a time has come, and otherwise has the rules asked again then.
func (d *decision) due(at Time) bool {
	if d.now >= at {
		return true
	}
	d.next = min(d.next, at)
	return false
}

func (d *decision) plan() (plan Plan) {
	d.match()
	d.m.noteTaints(d.slots, d.now)
	for i := range d.slots {
		d.settle(&d.slots[i])
	}
	mayRepair, news := false, same
	if d.isKnown() {
		d.chooseGeneration()
		plan = d.compare()
		mayRepair, news = !plan.ChangedByOthers || d.due(d.m.repairs(d.now)), urgent
		plan.ChangedByOthers, d.m.heard = plan.ChangedByOthers && d.m.heard, false
	}
	if d.isNews(news) || d.due(d.m.retryAt) {
		plan.Request = d.first(mayRepair)
	}
	return plan
}

// isKnown reports whether it is known what is stored.
func (d *decision) isKnown() bool { return d.Known && !d.m.unread }

// match finds what is stored of each slice.
func (d *decision) match() {
	d.slots = make([]slot, len(d.Want.Slices))
	for i, want := range d.Want.Slices {
		d.slots[i] = slot{want: want, target: want.Spec.Devices, news: Never}
	}
	for _, have := range d.Stored.Slices {
		i := slices.IndexFunc(d.slots, func(s slot) bool { return s.want.Name == have.Name })
		if i >= 0 {
			d.slots[i].have = have
		} else {
			d.strays = append(d.strays, have)
		}
	}
}

// compare says how what is stored differs from what should be, but for what can wait. Others have changed what is stored if it
// has another version than was answered.
func (d *decision) compare() Plan {
	plan := Plan{Wrong: len(d.strays), ChangedByOthers: len(d.strays) > 0}
	for i := range d.slots {
		s := &d.slots[i]
		if d.differs(s) {
			s.grade = max(s.grade, structure)
		}
		wrote, known := d.m.wrote[s.want.Name]
		plan.ChangedByOthers = plan.ChangedByOthers || known && (s.have == nil || s.have.ResourceVersion != wrote.version)
		switch {
		case s.have == nil:
			plan.Missing++
		case s.grade >= structure:
			plan.Wrong++
		}
	}
	plan.Published = plan.Missing+plan.Wrong == 0
	plan.ChangedByOthers = plan.ChangedByOthers && !plan.Published
	return plan
}

// object is a slice as it is written.
func (d *decision) object(s *slot) *resourceapi.ResourceSlice {
	object := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: s.want.Name,
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: corev1.SchemeGroupVersion.Identifier(), Kind: "Node", Name: d.Node, UID: d.Owner, Controller: new(true),
			}},
		},
		Spec: s.want.Spec,
	}
	object.Spec.Devices = s.target
	object.Spec.Pool = resourceapi.ResourcePool{Name: d.Node, Generation: d.generation, ResourceSliceCount: int64(len(d.slots))}
	if s.have != nil {
		object.UID, object.ResourceVersion = s.have.UID, s.have.ResourceVersion
	}
	return object
}

// differs reports whether a stored slice differs from what is wanted, taints aside.
func (d *decision) differs(s *slot) bool {
	if s.have == nil {
		return true
	}
	want := d.object(s)
	is, spec := s.have.Spec, want.Spec
	is.Devices, spec.Devices = nil, nil
	return !apiequality.Semantic.DeepEqual(is, spec) || !s.same ||
		!apiequality.Semantic.DeepEqual(s.have.OwnerReferences, want.OwnerReferences)
}

// isNews reports whether a taint that keeps pods away was wanted after the last attempt to write anything, on a slice of at
// least this grade. It is tried whatever was refused or is slowed down.
func (d *decision) isNews(least grade) bool {
	return slices.ContainsFunc(d.slots, func(s slot) bool { return s.grade >= least && s.news > d.m.triedAt })
}

// first is the write that comes before all others, or nil. Slices of the generation are put right before another one joins
// it: the pool is used as soon as all are there.
func (d *decision) first(mayRepair bool) *Request {
	for i := range d.slots {
		// The resource version in the request keeps it from doing harm where something else is stored than is known.
		s := &d.slots[i]
		isNews := s.news > d.m.last(s.want.Name).news && (d.isKnown() || s.news > d.m.triedAt)
		if s.grade == urgent && (mayRepair || isNews) {
			return d.taint(s)
		}
	}
	switch soft := slices.IndexFunc(d.slots, func(s slot) bool { return s.grade == soft }); {
	case !d.isKnown():
		return &Request{Verb: List}
	case mayRepair && (len(d.strays) > 0 || d.nextOfPool() != nil):
		return d.repair()
	case soft >= 0 && d.due(d.m.paid+d.m.p.Every):
		return d.put(&d.slots[soft])
	}
	return nil
}

// repair puts the pool right. Slices of older generations are used by nobody, so that they are deleted last.
func (d *decision) repair() *Request {
	next := d.nextOfPool()
	for _, stray := range d.strays {
		if next == nil || stray.Spec.Pool.Generation >= d.generation {
			return &Request{Verb: Delete, Slice: stray}
		}
	}
	return d.put(next)
}

// nextOfPool is the first slice that is not there, or not as it should be in what is no taint.
func (d *decision) nextOfPool() *slot {
	inGeneration := func(s *slot) bool { return s.have != nil && s.have.Spec.Pool.Generation == d.generation }
	joined := !slices.ContainsFunc(d.slots, func(s slot) bool { return s.have != nil && !inGeneration(&s) }) // by all that are there
	for _, is := range []func(*slot) bool{
		func(s *slot) bool { return s.grade == structure && inGeneration(s) },
		func(s *slot) bool { return s.have == nil && len(s.want.Spec.SharedCounters) == 0 },
		func(s *slot) bool { return s.have == nil && joined },
		func(s *slot) bool { return s.have != nil && s.grade >= structure },
	} {
		for i := range d.slots {
			if s := &d.slots[i]; is(s) {
				return s
			}
		}
	}
	return nil
}

func (d *decision) put(s *slot) *Request {
	return &Request{Verb: Put, Slice: d.object(s), News: s.news, informs: s.informs, spends: s.grade == soft}
}

// taint is the slice as it is stored, with the taints that it should have.
func (d *decision) taint(s *slot) *Request {
	object := s.have.DeepCopy()
	for i := range object.Spec.Devices {
		device := &object.Spec.Devices[i]
		if target := named(s.target, device.Name); target != nil {
			device.Taints = target.Taints
		}
	}
	return &Request{Verb: Put, Slice: object, News: s.news, informs: s.informs, spends: true}
}
