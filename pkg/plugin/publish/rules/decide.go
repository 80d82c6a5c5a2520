// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

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

// Never is the time of what has not happened, before everything.
const Never Time = -1 << 60

// Want is what there should be.
type Want struct {
	// Node is the name of the node and of its only pool.
	Node string
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
	// Owner is the UID of the node.
	Owner types.UID
	// Slices are all of the driver on the node, whatever their names.
	Slices []*resourceapi.ResourceSlice
}

// What a write is about.
type What uint8

// Kinds of requests.
const (
	List   What = iota + 1 // read what is stored
	Put                    // create the slice, or update it if it has a UID
	Delete                 // a slice as it is stored
)

// Write is one request.
type Write struct {
	What  What
	Slice *resourceapi.ResourceSlice
	// News is when the latest taint of the slice was wanted that keeps pods away.
	News Time
	// tells means that it has, or takes away, taints without effect.
	tells bool
	// spends means that it is of taints, and draws on the budget.
	spends bool
}

// Plan is the first request that is due, and what can be said of what is stored.
type Plan struct {
	// Write is nil if nothing is due.
	Write *Write
	// Published means that the API server has what it should have, except for what can wait.
	Published bool
	// Missing and Wrong are how many slices are not there, or other than they should be.
	Missing, Wrong int
	// Next is when something becomes due although nothing changes, or Never.
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
	// target are the devices as they are written, if the slice is.
	target []resourceapi.Device
	grade  grade
	news   Time
	// tells means that taints without effect differ.
	tells bool
	// since is when the first difference that can wait began.
	since Time
}

type decision struct {
	*Want
	*Stored
	m    *Memory
	p    *Pace
	now  Time
	next Time

	slots []slot
	// untold and unwanted become those of the memory.
	untold, unwanted map[taintKey]Time
	// strays are slices that should not be there.
	strays     []*resourceapi.ResourceSlice
	generation int64
}

// Decide says what is to be requested first. It changes nothing but the memory, which is for pace.
func Decide(want *Want, stored *Stored, m *Memory, p *Pace, now Time) Plan {
	d := decision{Want: want, Stored: stored, m: m, p: p, now: now, next: Never, untold: map[taintKey]Time{}, unwanted: map[taintKey]Time{}}
	plan := d.plan()
	plan.Next = d.next
	return plan
}

// due reports whether a time has come, and otherwise has the rules asked again then.
func (d *decision) due(at Time) bool {
	if d.now >= at {
		return true
	}
	if d.next == Never || at < d.next {
		d.next = at
	}
	return false
}

func (d *decision) plan() Plan {
	d.m.earn(d.p, d.now)
	d.match()
	d.m.say(d.slots, d.p, d.now)
	if d.m.doubt || !d.Known {
		return Plan{Write: d.list()}
	}
	for i := range d.slots {
		d.settle(&d.slots[i])
	}
	d.m.untold, d.m.unwanted = d.untold, d.unwanted
	d.chooseGeneration()
	plan := Plan{Wrong: len(d.strays)}
	for i := range d.slots {
		s := &d.slots[i]
		if d.differs(s) {
			s.grade = max(s.grade, structure)
		}
		switch {
		case s.have == nil:
			plan.Missing++
		case s.grade >= structure:
			plan.Wrong++
		}
	}
	plan.Published = plan.Missing+plan.Wrong == 0
	mayRepair := d.paceRepairs(plan.Published)
	if d.isNews(urgent) || d.due(d.m.retryAt) {
		plan.Write = d.first(mayRepair)
	}
	return plan
}

// list is what is requested while it is not known what is stored: a list, or before it a taint that keeps pods away. The version
// that a write names keeps it from doing harm.
func (d *decision) list() *Write {
	for i := range d.slots {
		s := &d.slots[i]
		if d.settle(s); d.Known && s.grade == urgent && s.news > d.m.triedAt && s.news > d.m.knew(s.want.Name) {
			return d.taint(s)
		}
	}
	if d.isNews(same) || d.due(d.m.retryAt) && d.due(d.m.listAt) {
		return &Write{What: List}
	}
	return nil
}

// match finds what is stored of each slice.
func (d *decision) match() {
	d.slots = make([]slot, len(d.Want.Slices))
	for i, want := range d.Want.Slices {
		d.slots[i] = slot{want: want, target: want.Spec.Devices, news: Never, since: d.now}
	}
	for _, have := range d.Stored.Slices {
		i := slices.IndexFunc(d.slots, func(s slot) bool { return s.want.Name == have.Name })
		if i >= 0 && d.holds(have) {
			d.slots[i].have = have
		} else {
			d.strays = append(d.strays, have)
		}
	}
}

// holds reports whether a slice is in the pool, which no update can change.
func (w *Want) holds(s *resourceapi.ResourceSlice) bool {
	return s.Spec.Pool.Name == w.Node && s.Spec.NodeName != nil && *s.Spec.NodeName == w.Node
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

// differs reports whether a slice is not as it should be in what is no taint.
func (d *decision) differs(s *slot) bool {
	if s.have == nil {
		return true
	}
	is, want := s.have.Spec, d.object(s).Spec
	is.Devices, want.Devices = nil, nil
	return !apiequality.Semantic.DeepEqual(is, want) || !sameDevices(s.have.Spec.Devices, s.target) ||
		!apiequality.Semantic.DeepEqual(s.have.OwnerReferences, d.object(s).OwnerReferences)
}

// isNews reports whether a taint that keeps pods away was wanted after the last attempt to write anything, on a slice of at
// least this grade. It is tried whatever was refused or is slowed down.
func (d *decision) isNews(least grade) bool {
	return slices.ContainsFunc(d.slots, func(s slot) bool { return s.grade >= least && s.news > d.m.triedAt })
}

// paceRepairs puts back what others change ever more slowly, the pool as a whole: of writes that depend on each other none is
// left out. It reports whether that may be done now.
func (d *decision) paceRepairs(published bool) (may bool) {
	isForeign := func(s slot) bool {
		wrote, known := d.m.wrote[s.want.Name]
		return known && (s.have == nil || s.have.ResourceVersion != wrote.version)
	}
	differs := !published && (len(d.strays) > 0 || slices.ContainsFunc(d.slots, isForeign))
	d.m.repairs(differs, d.p, d.now)
	for i := range d.slots {
		if s := &d.slots[i]; published && isForeign(*s) { // others have changed what does not matter
			d.m.wrote[s.want.Name] = written{s.have.ResourceVersion, d.m.wrote[s.want.Name].news}
		}
	}
	return !differs || d.due(d.m.repairAt)
}

// first is the write that comes before all others, or nil. Slices of the generation are put right before another one joins
// it: the pool is used as soon as all are there.
func (d *decision) first(mayRepair bool) *Write {
	for i := range d.slots {
		if s := &d.slots[i]; s.grade == urgent && (mayRepair || s.news > d.m.knew(s.want.Name)) {
			return d.taint(s)
		}
	}
	stray := slices.IndexFunc(d.strays, func(s *resourceapi.ResourceSlice) bool {
		return s.Spec.Pool.Generation >= d.generation || !d.holds(s)
	})
	if stray >= 0 && mayRepair {
		return &Write{What: Delete, Slice: d.strays[stray]}
	}
	if s := d.nextOfPool(); s != nil && mayRepair {
		return d.put(s)
	}
	if len(d.strays) > 0 && mayRepair {
		return &Write{What: Delete, Slice: d.strays[0]}
	}
	if s := d.oldest(); s != nil && (d.m.tokens > 0 || d.due(d.m.tokenAt+d.p.Every)) {
		return d.put(s)
	}
	return nil
}

// nextOfPool is the first slice that is not there, or not as it should be in what is no taint.
func (d *decision) nextOfPool() *slot {
	inGeneration := func(s *slot) bool { return s.have != nil && s.have.Spec.Pool.Generation == d.generation }
	for _, is := range []func(*slot) bool{
		func(s *slot) bool { return s.grade == structure && inGeneration(s) },
		func(s *slot) bool { return s.have == nil && len(s.want.Spec.SharedCounters) == 0 },
		func(s *slot) bool { return s.have == nil && !d.anyOlderThan(d.generation) },
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

// oldest is the slice whose taints have waited longest among those that can wait.
func (d *decision) oldest() (oldest *slot) {
	for i := range d.slots {
		if s := &d.slots[i]; s.grade == soft && (oldest == nil || s.since < oldest.since) {
			oldest = s
		}
	}
	return oldest
}

func (d *decision) put(s *slot) *Write {
	object := d.object(s)
	if s.have != nil {
		keepTaintTimes(object, s.have)
	}
	return &Write{What: Put, Slice: object, News: s.news, tells: s.tells, spends: s.grade == soft}
}

// taint is the slice as it is stored, with the taints that it should have.
func (d *decision) taint(s *slot) *Write {
	object := s.have.DeepCopy()
	for i := range object.Spec.Devices {
		device := &object.Spec.Devices[i]
		if at := slices.IndexFunc(s.target, func(t resourceapi.Device) bool { return t.Name == device.Name }); at >= 0 {
			device.Taints = s.target[at].Taints
		}
	}
	keepTaintTimes(object, s.have)
	return &Write{What: Put, Slice: object, News: s.news, tells: s.tells, spends: true}
}
