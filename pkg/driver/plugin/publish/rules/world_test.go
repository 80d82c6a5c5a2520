// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

// The world of the model: an API server, a kubelet, sources that say what is wrong with devices, and up to two instances of the
// plugin. Time is in steps.

var steps = Pace{
	InformLatest: 2, InformOnce: 4, Hold: 2, HoldForgotten: 5, Repair: 1, RepairMost: 4, RepairForgotten: 4, Retry: 2, RetryMost: 4,
	Burst: 3, Every: 2,
}

// horizon is the age from which on times make no difference.
const horizon Time = 10

// source is somebody who says that something is wrong with devices of a GPU.
type source struct {
	key     string
	gpu     int
	devices string // names of them, "ab" are both
	effect  resourceapi.DeviceTaintEffect
}

func (s *source) concerns(d *resourceapi.Device) bool {
	return strings.HasPrefix(d.Name, fmt.Sprint("g", s.gpu)) && strings.Contains(s.devices, d.Name[2:])
}

// process is an instance of the plugin.
type process struct {
	alive bool
	m     *Memory
	known Stored
	// late is a write that was decided before a newer instance came.
	late *Request
	// heard means that the watch has told everything, blind that it brings nothing any more, and wiped that the kubelet has deleted
	// all slices and is about to register the plugin.
	heard, blind, wiped bool
}

// world is one state. Slices are never changed, so that copies can share them.
type world struct {
	now      Time
	version  int
	owner    int
	slices   []*resourceapi.ResourceSlice
	backup   []*resourceapi.ResourceSlice
	up       bool
	refuses  bool
	mixed    bool // an older server answers, or a newer one
	said     [4]bool
	policy   bool // another one
	p        [2]process
	newest   int
	left     [faults]int
	restored bool // once, and so is a backup made
	backedUp bool

	// What follows only asserts.
	writes, writesAt Time // a bucket that leaks
	gone             [4]Time
	since            [4]Time
	meddled          bool // somebody else has changed a slice since all was right
	registered       bool // by the kubelet, and nothing has happened since
}

func (w *world) clone() *world {
	n := *w
	n.slices, n.backup = slices.Clone(w.slices), slices.Clone(w.backup)
	for i := range n.p {
		if n.p[i].m != nil {
			n.p[i].m = n.p[i].m.clone()
			n.p[i].known.Slices = slices.Clone(n.p[i].known.Slices)
		}
	}
	return &n
}

func (m *Memory) clone() *Memory {
	n := *m
	n.wantedSince, n.ended, n.wrote = maps.Clone(m.wantedSince), maps.Clone(m.ended), maps.Clone(m.wrote)
	return &n
}

// scenario is a small world with a few kinds of faults.
type scenario struct {
	name    string
	gpus    int
	sources []source
	faults  [faults]int
	// flap lets sources appear and vanish without end, and two is for a second instance that offers something else.
	flap, two bool
	// fresh: nothing is stored yet; otherwise all is. said: the sources say it from the beginning on.
	fresh, said bool
	// policies: the policy withdraws a device, or changes the counters.
	withdraws, recounts bool
	// drops: the older server drops counters, shares or taints.
	drops string
	// few is how many taints of a device the API server takes, if that is less than there are. observers and shares: each GPU is a
	// device that has a taint always and draws on no counters, or one that several claims can have. split: each GPU has a slice of counters.
	few                      int
	observers, shares, split bool
	// bound is for the bucket of writes, which loses one in leak steps; 0 for none.
	bound, leak Time
}

func (s *scenario) start() *world {
	w := &world{owner: 1, up: true, left: s.faults, now: 100}
	for i := range w.gone {
		w.gone[i], w.since[i] = Never, Never
	}
	w.begin(0)
	if s.fresh {
		return w
	}
	for i := range s.sources {
		w.said[i] = s.said
	}
	for range 20 {
		if plan := Decide(s.want(w, 0), &w.p[0].known, w.p[0].m, w.now); plan.Request != nil {
			s.carryOut(w, 0, plan.Request, false)
		}
	}
	w.now, w.writes = w.now+horizon, 0
	return w
}

func (w *world) begin(i int) {
	w.p[i] = process{alive: true, m: NewMemory(&steps), heard: true}
	w.newest = i
}

// want is what an instance wants.
func (s *scenario) want(w *world, i int) *Want {
	want := &Want{Node: node, Owner: w.nodeUID(), MaxTaints: s.maxTaints()}
	version := "v1"
	if w.policy && s.recounts {
		version = "v2"
	}
	var counters, devices []*resourceapi.ResourceSlice
	for g := range s.gpus {
		set := map[string]resourceapi.Counter{version: {Value: resource.MustParse("1")}}
		if g == 0 || s.split {
			counters = append(counters, slice(g, "", true))
			counters[g].Spec.SharedCounters = nil
		}
		spec := &counters[len(counters)-1].Spec
		spec.SharedCounters = append(spec.SharedCounters, resourceapi.CounterSet{Name: fmt.Sprint("g", g), Counters: set})
		index := g + 1
		if s.split {
			index = g + s.gpus
		}
		one := slice(index, "", false)
		one.Spec.Devices = nil
		for _, name := range []string{"a", "b"} {
			if name == "b" && g == 0 && (w.policy && s.withdraws || s.two && i == 1) {
				continue
			}
			d := resourceapi.Device{Name: fmt.Sprint("g", g, name), ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: fmt.Sprint("g", g), Counters: set}}}
			if s.shares {
				d.AllowMultipleAllocations = new(true)
			}
			for k, src := range s.sources {
				if w.said[k] && src.concerns(&d) {
					d.Taints = append(d.Taints, taint(src.key, src.effect))
				}
			}
			slices.SortFunc(d.Taints, func(x, y resourceapi.DeviceTaint) int { return rank(y.Effect) - rank(x.Effect) })
			d.Taints = d.Taints[:min(len(d.Taints), s.maxTaints())]
			slices.SortFunc(d.Taints, func(x, y resourceapi.DeviceTaint) int { return strings.Compare(x.Key, y.Key) })
			one.Spec.Devices = append(one.Spec.Devices, d)
		}
		if s.observers {
			observer := resourceapi.Device{Name: fmt.Sprint("g", g, "o"), Taints: []resourceapi.DeviceTaint{taint("observer", resourceapi.DeviceTaintEffectNoSchedule)}}
			one.Spec.Devices = append(one.Spec.Devices, observer)
		}
		devices = append(devices, one)
	}
	want.Slices = append(counters, devices...)
	return want
}

func (s *scenario) maxTaints() int { return cmp.Or(s.few, resourceapi.DeviceTaintsMaxLength) }

func (w *world) nodeUID() types.UID { return types.UID(fmt.Sprint("node-", w.owner)) }

// draws is the version of the counters that a device consumes, or empty.
func draws(d *resourceapi.Device) string {
	for _, c := range d.ConsumesCounters {
		for version := range c.Counters {
			return version
		}
	}
	return ""
}

func isObserver(d *resourceapi.Device) bool { return strings.HasSuffix(d.Name, "o") }

// check asserts what holds in every state: a pool that the scheduler uses keeps devices apart that exclude each other.
func (w *world) check() string {
	var newest, number int64
	for _, s := range w.slices {
		newest = max(newest, s.Spec.Pool.Generation)
	}
	counters := map[string]string{}
	for _, s := range w.slices {
		if s.Spec.Pool.Generation != newest {
			continue
		}
		number++
		for _, set := range s.Spec.SharedCounters {
			for version := range set.Counters {
				counters[set.Name] = version
			}
		}
	}
	wrong := ""
	for _, s := range w.slices {
		if s.Spec.Pool.Generation != newest {
			continue
		}
		if s.Spec.Pool.ResourceSliceCount != number {
			return "" // the pool is not complete
		}
		without := 0
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			switch version := draws(d); {
			case isObserver(d):
			case version == "":
				without++
			case counters[d.Name[:2]] == "":
				return "" // the scheduler calls the pool invalid
			case counters[d.Name[:2]] != version:
				wrong = "the pool is complete, and a device draws on counters of another version"
			}
		}
		if len(s.Spec.Devices) > 1 && without > 0 {
			wrong = "the pool is complete, and nothing keeps the parts of a GPU apart"
		}
	}
	return wrong
}

// right says what of that which an instance wants is not stored, taints included.
func (s *scenario) right(w *world, i int) string {
	want := s.want(w, i)
	if len(w.slices) != len(want.Slices) {
		return fmt.Sprintf("%d slices are stored, want %d", len(w.slices), len(want.Slices))
	}
	for _, wanted := range want.Slices {
		at := slices.IndexFunc(w.slices, func(s *resourceapi.ResourceSlice) bool { return s.Name == wanted.Name })
		if at < 0 {
			return "slice " + wanted.Name + " is missing"
		}
		is := w.slices[at]
		switch {
		case is.OwnerReferences[0].UID != w.nodeUID():
			return "slice " + wanted.Name + " has another owner"
		case is.Spec.Pool.Generation != w.slices[0].Spec.Pool.Generation:
			return "there are several generations"
		case content(is) != content(wanted):
			return fmt.Sprintf("slice %s has %s, want %s", wanted.Name, content(is), content(wanted))
		}
	}
	return ""
}

// content describes what a slice has, for comparing and for people.
func content(s *resourceapi.ResourceSlice) string {
	var b strings.Builder
	for _, set := range s.Spec.SharedCounters {
		b.WriteString(set.Name)
		for version := range set.Counters {
			b.WriteString(version)
		}
	}
	for i := range s.Spec.Devices {
		d := &s.Spec.Devices[i]
		b.WriteString(" " + d.Name + draws(d))
		if d.AllowMultipleAllocations != nil {
			b.WriteString(" shared")
		}
		for _, t := range d.Taints {
			b.WriteString("," + t.Key)
		}
	}
	return b.String()
}

// key tells states apart. Worlds that differ only in when they are, or in the numbers of versions, are the same.
func (w *world) key() string {
	var b strings.Builder
	versions := []int{}
	lowest := int64(1 << 60)
	note := func(all []*resourceapi.ResourceSlice) {
		for _, s := range all {
			n, _ := strconv.Atoi(s.ResourceVersion)
			versions, lowest = append(versions, n), min(lowest, s.Spec.Pool.Generation)
		}
	}
	note(w.slices)
	note(w.backup)
	for i := range w.p {
		note(w.p[i].known.Slices)
		if l := w.p[i].late; l != nil && l.Slice != nil {
			note([]*resourceapi.ResourceSlice{l.Slice})
		}
	}
	slices.Sort(versions)
	versions = slices.Compact(versions)
	rank := func(version string) int {
		n, _ := strconv.Atoi(version)
		i, _ := slices.BinarySearch(versions, n)
		return i
	}
	put := func(values ...any) { _, _ = fmt.Fprintln(&b, values...) }
	one := func(s *resourceapi.ResourceSlice) {
		put(s.Name, rank(s.ResourceVersion), s.OwnerReferences[0].UID, s.Spec.Pool.Generation-lowest, s.Spec.Pool.ResourceSliceCount, content(s))
	}
	all := func(list []*resourceapi.ResourceSlice) {
		sorted := slices.SortedFunc(slices.Values(list), func(x, y *resourceapi.ResourceSlice) int { return strings.Compare(x.Name, y.Name) })
		for _, s := range sorted {
			one(s)
		}
		put("|")
	}
	age := func(t Time) Time {
		if t == Never || w.now-t > horizon {
			return horizon
		}
		return w.now - t
	}
	future := func(t Time) Time { return max(t-w.now, 0) }
	put(w.owner, w.now%12, w.up, w.refuses, w.mixed, w.said, w.policy, w.newest, w.left, w.restored, w.backedUp, w.writes, age(w.writesAt), w.meddled, w.registered)
	for i := range w.gone {
		put(age(w.gone[i]), age(w.since[i]))
	}
	all(w.slices)
	all(w.backup)
	for i := range w.p {
		p := &w.p[i]
		if !p.alive {
			continue
		}
		put(i, p.heard, p.blind, p.wiped, p.known.Known)
		all(p.known.Slices)
		if l := p.late; l != nil {
			put("late", l.Verb, age(l.News), l.informs)
			if l.Slice != nil {
				one(l.Slice)
			}
		}
		m := p.m
		put(m.unread, m.heard, m.repaired, m.repairDelay, future(m.repairAt), age(m.repairAt), m.retryDelay, future(m.retryAt), age(m.triedAt), future(m.paid), age(m.paid))
		var lines []string
		for k, t := range m.wantedSince {
			lines = append(lines, fmt.Sprint("said ", k, age(t)))
		}
		for k, e := range m.ended {
			lines = append(lines, fmt.Sprint("ended ", k, age(e.at), e.again))
		}
		for k, wrote := range m.wrote {
			at := slices.IndexFunc(p.known.Slices, func(s *resourceapi.ResourceSlice) bool { return s.Name == k && s.ResourceVersion == wrote.version })
			lines = append(lines, fmt.Sprint("wrote ", k, at >= 0, age(wrote.news), age(wrote.informed)))
		}
		slices.Sort(lines)
		put(strings.Join(lines, ";"))
	}
	return b.String()
}
