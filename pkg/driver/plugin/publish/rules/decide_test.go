// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const node = "node-1"

// slice is one that is wanted: with a set of counters, or with a device that has these taints.
func slice(index int, name string, counters bool, taints ...resourceapi.DeviceTaint) *resourceapi.ResourceSlice {
	nodeName := node
	s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%d-slice", index)}}
	s.Spec = resourceapi.ResourceSliceSpec{Driver: "gpu.nvidia.com", NodeName: &nodeName}
	if counters {
		s.Spec.SharedCounters = []resourceapi.CounterSet{{Name: name}}
	} else {
		s.Spec.Devices = []resourceapi.Device{{Name: name, Taints: taints}}
	}
	return s
}

func taint(key string, effect resourceapi.DeviceTaintEffect) resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{Key: key, Effect: effect}
}

// server stores what it is told.
type server struct {
	Stored
	m       *Memory
	now     Time
	version int
	writes  []string
}

func newServer(stored ...*resourceapi.ResourceSlice) *server {
	return &server{Stored: Stored{Known: true, Slices: stored}, m: NewMemory(&Usual)}
}

// settle carries out what is due now.
func (s *server) settle(t *testing.T, want *Want) Plan {
	t.Helper()
	for range 100 {
		plan := Decide(want, &s.Stored, s.m, s.now)
		if plan.Request == nil {
			return plan
		}
		s.carryOut(plan.Request)
	}
	t.Fatalf("it does not come to rest: %q", s.writes)
	return Plan{}
}

func (s *server) carryOut(r *Request) {
	if r.Verb == List {
		s.m.Listed(s.now)
		return
	}
	s.Slices = slices.DeleteFunc(slices.Clone(s.Slices), func(o *resourceapi.ResourceSlice) bool { return o.UID == r.Slice.UID })
	if r.Verb == Delete {
		s.writes = append(s.writes, "-"+r.Slice.Name)
		s.m.Deleted(r.Slice.Name, s.now)
		return
	}
	verb := "="
	stored := r.Slice.DeepCopy()
	if stored.UID == "" {
		verb, stored.UID = "+", types.UID(fmt.Sprint("uid-", s.version))
	}
	s.version++
	stored.ResourceVersion = fmt.Sprint("v", s.version)
	s.writes = append(s.writes, fmt.Sprintf("%s%s@%d", verb, stored.Name[:1], stored.Spec.Pool.Generation))
	s.Slices = append(s.Slices, stored)
	s.m.Wrote(r, stored.ResourceVersion, s.now)
}

// TestDecide: what is written and deleted, in which order, and whether the pool gets another generation.
func TestDecide(t *testing.T) {
	t.Parallel()
	wanted := []*resourceapi.ResourceSlice{slice(0, "sets", true), slice(1, "gpu-1", false), slice(2, "gpu-2", false)}
	other := func(index int) []*resourceapi.ResourceSlice {
		changed := slices.Clone(wanted)
		changed[index] = slice(index, "other", index == 0)
		return changed
	}
	edit := func(index int, change func(*resourceapi.ResourceSlice)) func([]*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
		return func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
			change(s[index])
			return s
		}
	}
	for name, test := range map[string]struct {
		wanted []*resourceapi.ResourceSlice
		change func(stored []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice
		// Slices are created (+) or updated (=) in a generation, or deleted (-).
		writes []string
	}{
		"nothing":              {wanted: wanted},
		"one GPU":              {wanted: other(1), writes: []string{"=1@7"}},
		"counters":             {wanted: other(0), writes: []string{"=0@7"}},
		"counters and devices": {wanted: []*resourceapi.ResourceSlice{other(0)[0], other(1)[1], wanted[2]}, writes: []string{"=0@8", "=1@8", "=2@8"}},
		"both GPUs":            {wanted: []*resourceapi.ResourceSlice{wanted[0], other(1)[1], other(2)[2]}, writes: []string{"=1@7", "=2@7"}},
		"one more":             {wanted: append(other(1), slice(3, "gpu-3", false)), writes: []string{"+3@8", "=0@8", "=1@8", "=2@8"}},
		"none any more":        {writes: []string{"-0-slice", "-1-slice", "-2-slice"}},
		"one less":             {wanted: wanted[:2], writes: []string{"=0@8", "=1@8", "-2-slice"}},
		"none stored": {
			wanted: wanted, writes: []string{"+1@1", "+2@1", "+0@1"},
			change: func([]*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice { return nil },
		},
		"counters missing": {
			wanted: wanted, writes: []string{"+0@7"},
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice { return s[1:] },
		},
		"a GPU missing": {
			wanted: wanted, writes: []string{"+2@8", "=0@8", "=1@8"},
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice { return s[:2] },
		},
		"only counters left": {
			wanted: wanted, writes: []string{"+1@8", "+2@8", "=0@8"},
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice { return s[:1] },
		},
		"stopped in the middle": {
			wanted: wanted, writes: []string{"=1@8", "=2@8"},
			change: edit(0, func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Generation++ }),
		},
		"one too many": {
			wanted: wanted, writes: []string{"-by-hand"},
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
				extra := s[0].DeepCopy()
				extra.Name, extra.UID = "by-hand", "by-hand"
				return append(s, extra)
			},
		},
		"other names": {
			wanted: wanted, writes: []string{"+1@8", "+2@8", "+0@8", "-0-slice-x", "-1-slice-x", "-2-slice-x"},
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
				for _, one := range s {
					one.Name += "-x"
				}
				return s
			},
		},
		"other owner": {
			wanted: wanted, writes: []string{"=2@7"},
			change: edit(2, func(s *resourceapi.ResourceSlice) { s.OwnerReferences[0].UID = "old" }),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer()
			s.settle(t, &Want{Node: node, Owner: "node-uid", Slices: wanted, MaxTaints: 16})
			for _, stored := range s.Slices {
				stored.Spec.Pool.Generation = 7
			}
			slices.SortFunc(s.Slices, func(a, b *resourceapi.ResourceSlice) int { return int(a.Name[0]) - int(b.Name[0]) })
			if test.change != nil {
				s.Slices = test.change(s.Slices)
			}
			s.writes, s.m = nil, NewMemory(&Usual)
			plan := s.settle(t, &Want{Node: node, Owner: "node-uid", Slices: test.wanted, MaxTaints: 16})
			if !slices.Equal(s.writes, test.writes) || !plan.Published {
				t.Errorf("wrote %q, want %q; published: %v", s.writes, test.writes, plan.Published)
			}
		})
	}
}

// TestTaintTimes: a taint that is stored keeps its time when something else changes.
func TestTaintTimes(t *testing.T) {
	t.Parallel()
	since := metav1.NewTime(time.Unix(1e9, 0))
	lost := taint("lost", resourceapi.DeviceTaintEffectNoSchedule)
	s := newServer()
	first := slice(0, "a", false, lost)
	first.Spec.Devices = append(first.Spec.Devices, resourceapi.Device{Name: "b"})
	s.settle(t, &Want{Node: node, Owner: "node-uid", Slices: []*resourceapi.ResourceSlice{first}, MaxTaints: 16})
	s.Slices[0].Spec.Devices[0].Taints[0].TimeAdded = &since
	second := first.DeepCopy()
	second.Spec.Devices[1].Taints = []resourceapi.DeviceTaint{lost}
	s.settle(t, &Want{Node: node, Owner: "node-uid", Slices: []*resourceapi.ResourceSlice{second}, MaxTaints: 16})
	devices := s.Slices[0].Spec.Devices
	if a, b := devices[0].Taints[0].TimeAdded, devices[1].Taints[0].TimeAdded; !a.Equal(&since) || b != nil {
		t.Errorf("since %v and %v, want %v and nothing", a, b, since)
	}
	if first.Spec.Devices[0].Taints[0].TimeAdded != nil || second.Spec.Devices[0].Taints[0].TimeAdded != nil {
		t.Error("what is wanted was changed")
	}
}

// TestPaceOfTaints: one that keeps pods away is written at once. It is taken away at once as well, but ever more slowly if it
// comes back; one that only informs waits.
func TestPaceOfTaints(t *testing.T) {
	t.Parallel()
	lost, hot := taint("lost", resourceapi.DeviceTaintEffectNoSchedule), taint("hot", resourceapi.DeviceTaintEffectNone)
	want := func(taints ...resourceapi.DeviceTaint) *Want {
		return &Want{Node: node, Owner: "node-uid", Slices: []*resourceapi.ResourceSlice{slice(0, "gpu", false, taints...)}, MaxTaints: 16}
	}
	s := newServer()
	stored := func() (keys []string) {
		for _, t := range s.Slices[0].Spec.Devices[0].Taints {
			keys = append(keys, t.Key)
		}
		return keys
	}
	is := func(w *Want, what string, keys ...string) {
		t.Helper()
		if s.settle(t, w); !slices.Equal(stored(), keys) {
			t.Errorf("%s: stored %q, want %q", what, stored(), keys)
		}
	}
	is(want(), "at first")
	is(want(lost), "lost", "lost")
	is(want(), "back")
	s.now += time.Minute
	is(want(lost), "lost again", "lost")
	is(want(), "back again", "lost")
	s.now += Usual.Hold
	is(want(), "back for some time")

	is(want(hot), "hot")
	s.now += Usual.InformLatest
	is(want(hot), "hot for some time", "hot")
	is(want(), "cool", "hot")
	is(want(hot, lost), "lost and hot", "hot", "lost")
	is(want(lost), "lost and cool", "hot", "lost")
	s.now += Usual.InformOnce
	is(want(lost), "lost and cool for some time", "lost")

	s.now += time.Hour
	for range 200 {
		s.now += time.Second
		s.settle(t, want(lost))
		s.settle(t, want())
	}
	s.writes = nil
	for range 3600 {
		s.now += time.Second
		s.settle(t, want(lost))
		s.settle(t, want())
	}
	if len(s.writes) > 24 {
		t.Errorf("a condition that comes and goes: %d writes in an hour", len(s.writes))
	}
}

// TestNewsBeforeAll: a taint that keeps pods away is written during every delay.
func TestNewsBeforeAll(t *testing.T) {
	t.Parallel()
	s := newServer()
	calm := &Want{Node: node, Owner: "node-uid", Slices: []*resourceapi.ResourceSlice{slice(0, "a", false), slice(1, "b", false)}, MaxTaints: 16}
	broken := &Want{Node: node, Owner: "node-uid", Slices: []*resourceapi.ResourceSlice{slice(0, "a", false, taint("lost", resourceapi.DeviceTaintEffectNoExecute)), slice(1, "b", false)}, MaxTaints: 16}
	s.settle(t, calm)
	for range 4 { // somebody fights
		s.now += time.Second
		i := slices.IndexFunc(s.Slices, func(o *resourceapi.ResourceSlice) bool { return o.Name == "1-slice" })
		s.Slices[i].ResourceVersion, s.Slices[i].Spec.Devices = fmt.Sprint("other", s.now), nil
		s.m.Reread()
		s.settle(t, calm)
	}
	s.m.Refused(s.now, 0)
	s.now++
	if plan := Decide(calm, &s.Stored, s.m, s.now); plan.Request != nil || plan.Published || plan.Next <= s.now {
		t.Fatalf("it does not wait: %+v", plan)
	}
	plan := Decide(broken, &s.Stored, s.m, s.now)
	if plan.Request == nil || plan.Request.Verb != Put || plan.Request.Slice.Name != "0-slice" {
		t.Fatalf("the first request is %+v, want that the taint is written", plan.Request)
	}
	if generation := plan.Request.Slice.Spec.Pool.Generation; generation != s.Slices[0].Spec.Pool.Generation {
		t.Errorf("the taint takes its slice out of the pool: generation %d", generation)
	}
	s.m.Refused(s.now, 0)
	if plan := Decide(broken, &s.Stored, s.m, s.now+1); plan.Request != nil {
		t.Errorf("it was refused and is tried again at once: %+v", plan.Request)
	}
}
