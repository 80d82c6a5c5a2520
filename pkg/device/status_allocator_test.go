// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
)

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

	if got := newScheduler(t, exists).allocate(request("mig", 1, byUUID)); got != name {
		t.Errorf("allocated %q by the UUID", got)
	}
	if got := newScheduler(t, isGone).allocate(request("any", 1, byUUID)); got != "" {
		t.Errorf("allocated %q, which is gone", got)
	}
	second := `device.attributes["gpu.nvidia.com"].parentUUID == "` + base.Devices()[28].GPU.UUID + `"`
	if got := newScheduler(t, exists).allocate(request("mig", 1, second)); got != name {
		t.Errorf("allocated %q where the static partition would do", got)
	}

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
	if got := newScheduler(t, exists).holding("gpu-0000-28-00-0-mig-1g10gb-0").allocate(request("mig", 1, byUUID)); got != name {
		t.Errorf("allocated %q beside another partition", got)
	}
}

// allocateOnly tells whether this one device can be had, and keeps nothing.
func (s *scheduler) allocateOnly(t *testing.T, name string) bool {
	t.Helper()
	claims, err := s.try(request("any", 1, `device.attributes["gpu.nvidia.com"].uuid != "MIG-1"`))
	if err != nil {
		t.Fatal(err)
	}
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
