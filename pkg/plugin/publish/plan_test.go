// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// content is a slice with counters, or with one device.
func content(name string, counters bool) resourceslice.Slice {
	if counters {
		return resourceslice.Slice{SharedCounters: []resourceapi.CounterSet{{Name: name}}}
	}
	return resourceslice.Slice{Devices: []resourceapi.Device{{Name: name}}}
}

// TestPlan: what is written and deleted, and whether the pool gets another generation.
func TestPlan(t *testing.T) {
	t.Parallel()
	const generation = 7
	p := pool{driverName: testDriver, nodeName: testNode}
	wanted := []resourceslice.Slice{content("sets", true), content("gpu-1", false), content("gpu-2", false)}
	other := func(index int) []resourceslice.Slice {
		changed := append([]resourceslice.Slice(nil), wanted...)
		changed[index] = content("other", index == 0)
		return changed
	}
	for name, test := range map[string]struct {
		wanted               []resourceslice.Slice
		change               func(stored []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice
		before, write, after int
		generation           int64
	}{
		"nothing":              {wanted: wanted},
		"one GPU":              {wanted: other(1), write: 1, generation: generation},
		"counters":             {wanted: other(0), write: 1, generation: generation},
		"counters and devices": {wanted: []resourceslice.Slice{other(0)[0], other(1)[1], wanted[2]}, write: 3, generation: generation + 1},
		"both GPUs":            {wanted: []resourceslice.Slice{wanted[0], other(1)[1], other(2)[2]}, write: 2, generation: generation},
		"one more":             {wanted: append(other(1), content("gpu-3", false)), write: 4, generation: generation + 1},
		"one less":             {wanted: wanted[:2], write: 2, after: 1, generation: generation + 1},
		"none stored": {
			wanted: wanted, write: 3, generation: 1,
			change: func([]*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice { return nil },
		},
		"one missing": {
			wanted: wanted, write: 1, generation: generation,
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice { return s[1:] },
		},
		"stopped in the middle": {
			wanted: wanted, write: 2, generation: generation + 1,
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
				s[0].Spec.Pool.Generation++
				return s
			},
		},
		"one too many": {
			wanted: wanted, before: 1,
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
				extra := s[0].DeepCopy()
				extra.Name, extra.UID = "by-hand", "by-hand"
				return append(s, extra)
			},
		},
		"other names": {
			wanted: wanted, write: 3, after: 3, generation: generation + 1,
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
				for _, slice := range s {
					slice.Name += "-x7k2p"
				}
				return s
			},
		},
		"other pool": {
			wanted: wanted, before: 1, write: 1, generation: generation,
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
				s[2].Spec.Pool.Name = "other"
				return s
			},
		},
		"other owner": {
			wanted: wanted, write: 1, generation: generation,
			change: func(s []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
				s[2].OwnerReferences[0].UID = "old"
				return s
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var stored []*resourceapi.ResourceSlice
			for i, content := range wanted {
				slice := p.object(i, len(wanted), content, "node-uid")
				slice.UID, slice.ResourceVersion = types.UID(slice.Name), "1"
				slice.Spec.Pool.Generation = generation
				stored = append(stored, slice)
			}
			if test.change != nil {
				stored = test.change(stored)
			}
			got := p.plan(stored, test.wanted, "node-uid")
			if len(got.before) != test.before || len(got.write) != test.write || len(got.after) != test.after {
				t.Errorf("%d deleted, %d written, %d deleted; want %d, %d, %d",
					len(got.before), len(got.write), len(got.after), test.before, test.write, test.after)
			}
			for _, slice := range got.write {
				if pool := slice.Spec.Pool; pool.Generation != test.generation || pool.ResourceSliceCount != int64(len(test.wanted)) {
					t.Errorf("slice %s has the pool %+v, want generation %d", slice.Name, pool, test.generation)
				}
			}
			if (test.before+test.write+test.after == 0) != got.empty() {
				t.Error("empty or not")
			}
		})
	}
}

// TestTaintTimes: a taint that is stored keeps its time when something else changes.
func TestTaintTimes(t *testing.T) {
	t.Parallel()
	since := metav1.NewTime(time.Unix(1e9, 0))
	taint := resourceapi.DeviceTaint{Key: "lost", Effect: resourceapi.DeviceTaintEffectNoSchedule}
	p := pool{driverName: testDriver, nodeName: testNode}
	wanted := []resourceslice.Slice{{Devices: []resourceapi.Device{
		{Name: "a", Taints: []resourceapi.DeviceTaint{taint}}, {Name: "b", Taints: []resourceapi.DeviceTaint{taint}},
	}}}
	old := p.object(0, 1, wanted[0], "uid").DeepCopy()
	old.UID, old.Spec.Pool.Generation = "uid", 1
	old.Spec.Devices[0].Taints[0].TimeAdded = &since
	old.Spec.Devices[1].Taints = nil
	got := p.plan([]*resourceapi.ResourceSlice{old}, wanted, "uid")
	if len(got.write) != 1 {
		t.Fatalf("%d slices to write, want 1", len(got.write))
	}
	a, b := got.write[0].Spec.Devices[0].Taints[0].TimeAdded, got.write[0].Spec.Devices[1].Taints[0].TimeAdded
	if !a.Equal(&since) || b != nil {
		t.Errorf("since %v and %v, want %v and nothing", a, b, since)
	}
	if wanted[0].Devices[0].Taints[0].TimeAdded != nil {
		t.Error("what is wanted was changed")
	}
}

// TestSliceNames: in the order of the slices, and never too long.
func TestSliceNames(t *testing.T) {
	t.Parallel()
	for _, node := range []string{testNode, strings.Repeat("n", validation.DNS1123SubdomainMaxLength)} {
		p := pool{driverName: testDriver, nodeName: node}
		for i := range 300 {
			name := p.sliceName(i)
			if problems := validation.IsDNS1123Subdomain(name); problems != nil {
				t.Fatalf("%s: %v", name, problems)
			}
			if i > 0 && name <= p.sliceName(i-1) {
				t.Fatalf("%s comes before the one before it", name)
			}
		}
	}
	long := strings.Repeat("n", validation.DNS1123SubdomainMaxLength-1)
	a, b := pool{driverName: testDriver, nodeName: long + "a"}, pool{driverName: testDriver, nodeName: long + "b"}
	if a.sliceName(0) == b.sliceName(0) {
		t.Error("slices of two nodes with the same name")
	}
}
