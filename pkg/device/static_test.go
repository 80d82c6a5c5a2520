// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// TestStaticDevice compares a static device with the one that could be made in
// its place: only the UUID differs. The static one can be found by its name and
// comes first.
func TestStaticDevice(t *testing.T) {
	for _, b := range partitionable(t) {
		base := mustInventory(t, b.node)
		for _, like := range base.Devices() {
			if like.Partition == nil {
				continue
			}
			s := static(b.gpu().PCIAddress, like.Partition.Profile.ID, like.Partition.Placement, "MIG-1")
			i := base.With(Status{Static: []Static{s}})
			want := like
			want.Name += "-static"
			want.Static = &s
			if diff := cmp.Diff(append([]Device{want}, base.Devices()...), i.Devices()); diff != "" {
				t.Fatalf("%s: devices (-want +got):\n%s", b.name, diff)
			}
			if got, ok := i.Lookup(want.Name); !ok || got != i.Devices()[0] {
				t.Errorf("%s: %s is not found", b.name, want.Name)
			}
			if got, ok := i.Lookup(like.Name); !ok || got != like {
				t.Errorf("%s: %s is not found beside the static device", b.name, like.Name)
			}
			devices := devicesOf(i.ResourceSlices(testOptions))
			published := devices[1+slices.IndexFunc(base.Devices(), func(d Device) bool { return d == like })]
			if uuid := published.Attributes["uuid"].StringValue; *uuid != "" {
				t.Errorf("%s: %s has the UUID %s", b.name, published.Name, *uuid)
			}
			published.Name, published.Taints = want.Name, nil
			published.Attributes["uuid"] = resourceapi.DeviceAttribute{StringValue: new("MIG-1")}
			expect.Same(t, devices[0], published, b.name+": like the one that could be made, "+want.Name)
		}
	}
}

// TestStaticIsNotPublished where there is nothing like it.
func TestStaticIsNotPublished(t *testing.T) {
	for name, tc := range map[string]struct {
		board string
		s     Static
	}{
		"no MIG":              {"t4", static(firstGPU, profile1g, at(0, 1), "MIG-1")},
		"MIG is off":          {"a100-40", static(firstGPU, profile1g, at(0, 1), "MIG-1")},
		"unknown profile":     {"h100-80-sxm", static(firstGPU, 77, at(0, 1), "MIG-1")},
		"unknown placement":   {"h100-80-sxm", static(firstGPU, profile3g, at(1, 4), "MIG-1")},
		"beyond the GPU":      {"h100-80-sxm", static(firstGPU, profile1g, at(8, 1), "MIG-1")},
		"GPU that is not one": {"h100-80-sxm", static(secondGPU, profile1g, at(0, 1), "MIG-1")},
	} {
		t.Run(name, func(t *testing.T) {
			base := mustInventory(t, loadNode(t, tc.board))
			i := base.With(Status{Static: []Static{tc.s}})
			expect.Same(t, i.Devices(), base.Devices(), "devices")
			checkAPI(t, i.ResourceSlices(testOptions))
		})
	}
}

// TestStaticAgain: a partition that exists wins over one that is gone from the
// same place, and of several that are gone it does not matter which came first.
func TestStaticAgain(t *testing.T) {
	uuid := func(statics ...Static) string {
		t.Helper()
		i := mustInventory(t, loadNode(t, "h100-80-sxm")).With(Status{Static: statics})
		d, ok := i.Lookup("gpu-0000-1b-00-0-mig-1g10gb-3-static")
		if !ok || len(i.Devices()) != 29 {
			t.Fatalf("devices %v", names(i.Devices()))
		}
		return d.Static.UUID
	}
	s := static(firstGPU, profile1g, at(3, 1), "MIG-2")
	old, older := gone(static(firstGPU, profile1g, at(3, 1), "MIG-1")), gone(static(firstGPU, profile1g, at(3, 1), "MIG-0"))
	expect.Same(t, uuid(old, s), "MIG-2", "UUID")
	if one, other := uuid(old, older), uuid(older, old); one != other {
		t.Errorf("%s or %s, as the order has it", one, other)
	}
}

// TestRoomForStatic: on every board, all partitions that it can hold at one time
// are published beside as many that are gone.
func TestRoomForStatic(t *testing.T) {
	for _, b := range partitionable(t) {
		base := mustInventory(t, b.node)
		var most []PartitionShape
		visitLegal(b.gpu().MIG, func(layout []PartitionShape) {
			if len(layout) > len(most) {
				most = slices.Clone(layout)
			}
		})
		var worst Status
		for _, shape := range most {
			worst.Static = append(worst.Static, static(b.gpu().PCIAddress, shape.Profile.ID, shape.Placement, "MIG-1"))
			// Another profile that starts in the same place, where there is one.
			for _, d := range base.Devices() {
				if d.Partition != nil && d.Partition.Placement.Start == shape.Placement.Start && d.Partition.Profile.ID != shape.Profile.ID {
					worst.Static = append(worst.Static, gone(static(b.gpu().PCIAddress, d.Partition.Profile.ID, d.Partition.Placement, "MIG-2")))
					break
				}
			}
		}
		got := base.With(worst)
		if want := len(base.Devices()) + len(worst.Static); len(got.Devices()) != want || len(worst.Static) < 2*len(most)-1 {
			t.Errorf("%s: %d devices, want %d", b.name, len(got.Devices()), want)
		}
		checkAPI(t, got.ResourceSlices(testOptions))
	}
}

// TestTooManyStatic: what no hardware can hold leaves the slice valid, and the
// devices that do not depend on it in it.
func TestTooManyStatic(t *testing.T) {
	inventories := map[string]*Inventory{"crowded": crowded(t)}
	for _, b := range partitionable(t) {
		inventories[b.name] = mustInventory(t, b.node)
	}
	for name, base := range inventories {
		var absurd Status
		for _, d := range base.Devices() {
			if d.Partition != nil {
				absurd.Static = append(absurd.Static, static(firstGPU, d.Partition.Profile.ID, d.Partition.Placement, "MIG-1"))
			}
		}
		i := base.With(absurd)
		extra := min(reservedForStatic, len(absurd.Static))
		expect.Same(t, i.Devices()[extra:], base.Devices(), name+": devices")
		checkAPI(t, i.ResourceSlices(testOptions))
	}
}

// TestAllocatorStatic: a static partition is taken before anything is cut, its
// UUID finds it, and what overlaps it is out, by taints while nobody has it and by
// counters while somebody does.
func TestAllocatorStatic(t *testing.T) {
	const name = "gpu-0000-28-00-0-mig-3g40gb-4-static"
	byUUID := `device.attributes["gpu.nvidia.com"].uuid == "MIG-1"`
	base := mustInventory(t, replicate(loadNode(t, "h100-80-sxm"), 2))
	s := static(secondGPU, profile3g, at(4, 4), "MIG-1")
	exists := base.With(Status{Static: []Static{s}}).ResourceSlices(testOptions)
	isGone := base.With(Status{Static: []Static{gone(s)}}).ResourceSlices(testOptions)

	expect.Same(t, newScheduler(t, exists).allocate(request("mig", 1, byUUID)), name, "by the UUID")
	expect.Same(t, newScheduler(t, isGone).allocate(request("any", 1, byUUID)), "", "gone")
	second := `device.attributes["gpu.nvidia.com"].parentUUID == "` + base.Devices()[28].GPU.UUID + `"`
	expect.Same(t, newScheduler(t, exists).allocate(request("mig", 1, second)), name, "where the static partition would do")

	// Everything beside it can be had, and nothing else.
	var want []string
	for _, d := range base.Devices() {
		if d.GPU.PCIAddress == secondGPU && d.Partition != nil && !d.Partition.Placement.Overlaps(s.Placement) {
			want = append(want, d.Name)
		}
	}
	for what, scheduler := range map[string]*scheduler{
		"idle":                    newScheduler(t, exists),
		"allocated":               newScheduler(t, exists).holding(name),
		"allocated and gone":      newScheduler(t, isGone).holding(name),
		"allocated, taints apart": newScheduler(t, untainted(exists)).holding(name),
	} {
		var got []string
		for _, d := range base.Devices() {
			if d.GPU.PCIAddress == secondGPU && scheduler.only(name, d.Name).allocateOnly(t, d.Name) {
				got = append(got, d.Name)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: allocated\n%v, want\n%v", what, got, want)
		}
	}
	expect.Same(t, newScheduler(t, exists).holding("gpu-0000-28-00-0-mig-1g10gb-0").allocate(request("mig", 1, byUUID)), name, "beside another partition")
}

// allocateOnly reports whether this one device can be had, and keeps nothing.
func (s *scheduler) allocateOnly(t *testing.T, name string) bool {
	t.Helper()
	claims := must.Get(s.try(request("any", 1, `device.attributes["gpu.nvidia.com"].uuid != "MIG-1"`)))(t)
	return len(claims) == 1 && claims[0][0] == name
}

// untainted is what a cluster stores that does not know taints.
func untainted(objects []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
	var out []resourceapi.ResourceSlice
	for _, object := range objects {
		object = *object.DeepCopy()
		for n := range object.Spec.Devices {
			object.Spec.Devices[n].Taints = nil
		}
		out = append(out, object)
	}
	return out
}

// TestStaticAgainstHardware: beside static partitions, taints and counters allow
// what the hardware allows. Static ones come one at a time and in pairs; beside
// each, all layouts are tried, instance by instance.
func TestStaticAgainstHardware(t *testing.T) {
	for _, b := range partitionable(t) {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			base := mustInventory(t, b.node)
			mig := b.gpu().MIG
			ledger := newLedger(t, base.ResourceSlices(testOptions))
			var shapes []PartitionShape
			var deviceNames []string
			for _, d := range base.Devices() {
				if d.Partition != nil {
					shapes = append(shapes, *d.Partition)
					deviceNames = append(deviceNames, d.Name)
				}
			}
			compared := 0
			visitLegal(mig, func(statics []PartitionShape) {
				if len(statics) == 0 || len(statics) > 2 {
					return
				}
				var s Status
				for _, shape := range statics {
					s.Static = append(s.Static, static(b.gpu().PCIAddress, shape.Profile.ID, shape.Placement, "MIG-1"))
				}
				bad := sets.New[string]()
				for _, d := range devicesOf(base.With(s).ResourceSlices(testOptions)) {
					if len(d.Taints) > 0 {
						bad.Insert(d.Name)
					}
				}
				h := &hardware{mig: mig, instances: slices.Clone(statics)}
				var held []string
				var grow func(from int)
				grow = func(from int) {
					for n := from; n < len(shapes); n++ {
						allowed := h.allows(shapes[n])
						compared++
						if got := !bad.Has(deviceNames[n]) && ledger.fits(append(held, deviceNames[n])...); got != allowed {
							t.Fatalf("%s beside static %v and %v: allowed %t, hardware says %t", deviceNames[n], s.Static, held, got, allowed)
						}
						if allowed {
							h.instances = append(h.instances, shapes[n])
							held = append(held, deviceNames[n])
							grow(n + 1)
							h.instances = h.instances[:len(h.instances)-1]
							held = held[:len(held)-1]
						}
					}
				}
				grow(0)
			})
			if compared == 0 {
				t.Error("nothing was compared")
			}
		})
	}
}
