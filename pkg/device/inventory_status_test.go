// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// The GPUs of a node that replicate makes of the H100.
const (
	firstGPU  = "0000:1b:00.0"
	secondGPU = "0000:28:00.0"
	thirdGPU  = "0000:35:00.0"
)

// Profiles of the H100.
const (
	profile3g   = 9
	profile1g   = 19
	profile1gMe = 20
)

func at(start, size int) gpu.Placement { return gpu.Placement{Start: start, Size: size} }

func static(address string, profile uint32, place gpu.Placement, uuid string) Static {
	return Static{PCIAddress: address, ProfileID: profile, Placement: place, UUID: uuid}
}

func gone(s Static) Static {
	s.Gone = true
	return s
}

func onGPU(address string, reason Reason) Condition {
	return Condition{PCIAddress: address, Reason: reason}
}

func inPlace(address string, place gpu.Placement, reason Reason) Condition {
	return Condition{PCIAddress: address, Where: &place, Reason: reason}
}

func ofProfile(c Condition, profile uint32) Condition {
	c.ProfileID = &profile
	return c
}

func exactly(c Condition, profile uint32) Condition {
	c.Exact = true
	return ofProfile(c, profile)
}

// mixedStatus is about three GPUs and has everything there is.
func mixedStatus() Status {
	return Status{
		Static: []Static{
			static(secondGPU, profile1g, at(4, 1), "MIG-a"),
			static(firstGPU, profile3g, at(0, 4), "MIG-b"),
			gone(static(firstGPU, profile1g, at(6, 1), "MIG-c")),
			gone(static(secondGPU, profile1g, at(4, 1), "MIG-d")),
			gone(static(thirdGPU, profile1g, at(0, 1), "MIG-e")),
			gone(static(thirdGPU, profile1g, at(0, 1), "MIG-f")),
		},
		Conditions: []Condition{
			onGPU(thirdGPU, Unresponsive),
			onGPU(thirdGPU, Lost),
			onGPU(thirdGPU, ResetRequired),
			inPlace(secondGPU, at(4, 4), ReleasePending),
			ofProfile(inPlace(secondGPU, at(0, 1), ReleasePending), profile1gMe),
			inPlace(secondGPU, at(0, 4), Occupied),
			inPlace(firstGPU, at(4, 2), ReleasePending),
			inPlace(firstGPU, at(4, 2), ReleasePending),
		},
	}
}

func shuffled(s Status) Status {
	s = Status{Static: slices.Clone(s.Static), Conditions: slices.Clone(s.Conditions)}
	rand.Shuffle(len(s.Static), func(i, j int) { s.Static[i], s.Static[j] = s.Static[j], s.Static[i] })
	rand.Shuffle(len(s.Conditions), func(i, j int) { s.Conditions[i], s.Conditions[j] = s.Conditions[j], s.Conditions[i] })
	return s
}

// TestSameStatus: for the same status the inventory is the same, so that a poll that finds nothing new publishes nothing. One
// that the caller has changed meanwhile is another one.
func TestSameStatus(t *testing.T) {
	base, s := mustInventory(t, loadNode(t, "h100-80-sxm")), mixedStatus()
	first := base.With(s)
	if base.With(shuffled(s)) != first || base.With(Status{}) == first {
		t.Error("the status and the inventory do not change together")
	}
	where, profile := at(0, 1), uint32(19)
	c := onGPU(firstGPU, Occupied)
	c.Where, c.ProfileID = &where, &profile
	s = Status{Conditions: []Condition{c}}
	for _, change := range []func(){func() { where = at(0, 8) }, func() { profile = 9 }} {
		last := base.With(s)
		if change(); base.With(s) == last {
			t.Error("a status that the caller has changed counts as the last one")
		}
	}
}

// TestWithIsPure: the receiver stays as it is, the last status counts, the order
// of its entries does not, and the caller may change it afterwards.
func TestWithIsPure(t *testing.T) {
	base := mustInventory(t, replicate(loadNode(t, "h100-80-sxm"), 4))
	plain, devices := base.DriverResources(testOptions), base.Devices()
	s := mixedStatus()
	with := base.With(s)
	want := with.DriverResources(testOptions)
	if reflect.DeepEqual(plain, want) {
		t.Fatal("the status makes no difference")
	}
	expect.Same(t, s, mixedStatus(), "the status changed")
	for range 20 {
		base.With(Status{}) // otherwise it is the last one again
		if got := base.With(shuffled(s)).DriverResources(testOptions); !reflect.DeepEqual(want, got) {
			t.Fatalf("the order makes a difference (-want +got):\n%s", cmp.Diff(want, got))
		}
	}
	if got := with.With(Status{}).DriverResources(testOptions); !reflect.DeepEqual(plain, got) {
		t.Errorf("what was the case before is still there (-want +got):\n%s", cmp.Diff(plain, got))
	}
	if got := base.With(Status{Conditions: []Condition{onGPU(firstGPU, Lost)}}).With(s).DriverResources(testOptions); !reflect.DeepEqual(want, got) {
		t.Errorf("(-want +got):\n%s", cmp.Diff(want, got))
	}
	for n := range s.Static {
		s.Static[n] = Static{}
	}
	for n := range s.Conditions {
		if s.Conditions[n].Where != nil {
			*s.Conditions[n].Where = at(0, 8)
		}
	}
	if got := with.DriverResources(testOptions); !reflect.DeepEqual(want, got) {
		t.Errorf("a change of the status came too late and counted (-want +got):\n%s", cmp.Diff(want, got))
	}
	if got := base.DriverResources(testOptions); !reflect.DeepEqual(plain, got) || !reflect.DeepEqual(devices, base.Devices()) {
		t.Errorf("the receiver changed (-want +got):\n%s", cmp.Diff(plain, got))
	}
}

// TestOneSlicePerChange: what changes on one GPU changes its slice and no other,
// so that the pool keeps its generation.
func TestOneSlicePerChange(t *testing.T) {
	node := replicate(loadNode(t, "h100-80-sxm"), 12)
	base := mustInventory(t, node)
	mixed := mixedStatus()
	before := base.With(mixed).DriverResources(testOptions).Pools["node-1"].Slices
	own := slices.IndexFunc(before, func(s resourceslice.Slice) bool {
		return len(s.Devices) > 0 && strings.HasPrefix(s.Devices[0].Name, GPUName(secondGPU))
	})
	changes := map[string]Status{"nothing any more": {}}
	for _, s := range mixed.Static {
		if s.PCIAddress != secondGPU {
			changes["nothing any more"] = Status{Static: append(changes["nothing any more"].Static, s)}
		}
	}
	for name, add := range map[string]Status{
		"a static partition": {Static: []Static{static(secondGPU, profile1gMe, at(6, 1), "MIG-x")}},
		"one that is gone":   {Static: []Static{gone(static(secondGPU, profile1gMe, at(6, 1), "MIG-x"))}},
		"the GPU is lost":    {Conditions: []Condition{onGPU(secondGPU, Lost)}},
		"a place is taken":   {Conditions: []Condition{ofProfile(inPlace(secondGPU, at(7, 1), Occupied), profile1gMe)}},
	} {
		changes[name] = Status{Static: slices.Concat(mixed.Static, add.Static), Conditions: slices.Concat(mixed.Conditions, add.Conditions)}
	}
	only := changes["nothing any more"]
	for _, c := range mixed.Conditions {
		if c.PCIAddress != secondGPU {
			only.Conditions = append(only.Conditions, c)
		}
	}
	changes["nothing any more"] = only
	for name, s := range changes {
		after := base.With(s).DriverResources(testOptions).Pools["node-1"].Slices
		if len(after) != len(before) {
			t.Fatalf("%s: %d slices, before %d", name, len(after), len(before))
		}
		for n := range after {
			if same := reflect.DeepEqual(before[n], after[n]); same == (n == own) {
				t.Errorf("%s: slice %d of %d, the GPU's own is %d: unchanged is %t", name, n, len(after), own, same)
			}
		}
	}
}

// TestWithConcurrently is for the race detector.
func TestWithConcurrently(t *testing.T) {
	base := mustInventory(t, replicate(loadNode(t, "h100-80-sxm"), 3))
	with := base.With(mixedStatus())
	want := with.DriverResources(testOptions)
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for range 5 {
				if got := base.With(mixedStatus()).DriverResources(testOptions); !reflect.DeepEqual(want, got) {
					t.Error("a status given at the same time as others counts differently")
				}
				if got := with.With(Status{}).Devices(); len(got) != len(base.Devices()) {
					t.Errorf("%d devices", len(got))
				}
				with.Lookup("gpu-0000-1b-00-0")
			}
		})
	}
	group.Wait()
}

// ordersAlike reports whether the order of statuses sees no difference between two.
func ordersAlike(a, b Status) bool {
	a, b = a.Sorted(), b.Sorted()
	return slices.EqualFunc(a.Static, b.Static, func(x, y Static) bool { return compareStatic(x, y) == 0 }) &&
		slices.EqualFunc(a.Conditions, b.Conditions, func(x, y Condition) bool { return compareConditions(x, y) == 0 })
}

// What is published does not depend on the order in which things were found.
func TestStatusOrder(t *testing.T) {
	static := Static{PCIAddress: "0000:1b:00.0", ProfileID: 19, Placement: gpu.Placement{Start: 1, Size: 1}, UUID: "MIG-1"}
	condition := func() Condition {
		return Condition{
			PCIAddress: "0000:1b:00.0", Where: &gpu.Placement{Start: 4, Size: 4}, ProfileID: new(uint32(9)),
			Reason: ReleasePending, Message: "in use",
		}
	}
	status := func(change func(s *Static, c *Condition)) Status {
		s, c := static, condition()
		change(&s, &c)
		return Status{Static: []Static{s}, Conditions: []Condition{c}}
	}
	same := status(func(*Static, *Condition) {})
	if !ordersAlike(same, status(func(*Static, *Condition) {})) || !ordersAlike(Status{}, Status{Static: []Static{}, Conditions: []Condition{}}) {
		t.Error("two that say the same differ")
	}
	if ordersAlike(same, Status{}) || ordersAlike(Status{}, same) {
		t.Error("something equals nothing")
	}
	for name, change := range map[string]func(s *Static, c *Condition){
		"GPU of the partition":   func(s *Static, _ *Condition) { s.PCIAddress = "0000:28:00.0" },
		"profile":                func(s *Static, _ *Condition) { s.ProfileID = 20 },
		"start":                  func(s *Static, _ *Condition) { s.Placement.Start = 2 },
		"size":                   func(s *Static, _ *Condition) { s.Placement.Size = 2 },
		"UUID":                   func(s *Static, _ *Condition) { s.UUID = "MIG-2" },
		"gone":                   func(s *Static, _ *Condition) { s.Gone = true },
		"GPU of the condition":   func(_ *Static, c *Condition) { c.PCIAddress = "0000:28:00.0" },
		"nowhere in particular":  func(_ *Static, c *Condition) { c.Where = nil },
		"where":                  func(_ *Static, c *Condition) { c.Where.Size = 2 },
		"instance not known":     func(_ *Static, c *Condition) { c.ProfileID = nil },
		"profile of an instance": func(_ *Static, c *Condition) { *c.ProfileID = 5 },
		"kind":                   func(_ *Static, c *Condition) { c.Kind = MPS },
		"reason":                 func(_ *Static, c *Condition) { c.Reason = Occupied },
		"message":                func(_ *Static, c *Condition) { c.Message = "" },
	} {
		if other := status(change); ordersAlike(same, other) || ordersAlike(other, same) {
			t.Errorf("a change of %s makes no difference", name)
		}
	}
}

// TestFaultsOfScheduler compares with what test/allocators found out by running the
// schedulers' code.
func TestFaultsOfScheduler(t *testing.T) {
	data := must.Get(os.ReadFile("testdata/schedulers.yaml"))(t)
	var found map[string]SchedulerFaults
	if err := yaml.UnmarshalStrict(data, &found); err != nil || len(found) < 6 {
		t.Fatalf("%d versions, %v", len(found), err)
	}
	for _, same := range [][2]string{
		{"1.34.13", "1.34.0"}, {"1.35.5", "v1.35.0"}, {"1.35.10", "v1.35.6"}, {"1.36.1", "v1.36.0"},
		{"1.36.1", "v1.36.1-gke.1000"}, {"1.36.2", "v1.36.2+k3s1"}, {"1.37.2", "v1.38.0-alpha.0"},
	} {
		found[same[1]] = found[same[0]]
	}
	for kubernetes, want := range found {
		if got, err := FaultsOfScheduler(kubernetes); err != nil || got != want {
			t.Errorf("Kubernetes %s: got %+v, %v, want %+v", kubernetes, got, err, want)
		}
	}
	if _, err := FaultsOfScheduler("unknown"); err == nil {
		t.Error("no error for a version that is none")
	}
}
