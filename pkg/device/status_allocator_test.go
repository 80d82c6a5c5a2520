// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/policy"
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

// TestAllocatorTaints gives everything away that there is, and never a device that
// is tainted, except to whom tolerates it.
func TestAllocatorTaints(t *testing.T) {
	i := mustInventory(t, replicate(loadNode(t, "h100-80-sxm"), 4)).With(mixedStatus())
	objects := i.ResourceSlices(testOptions)
	bad := sets.New[string]()
	for _, d := range devicesOf(objects) {
		if len(d.Taints) > 0 {
			bad.Insert(d.Name)
		}
	}
	s := newScheduler(t, objects)
	got := sets.New[string]()
	for _, r := range []resourceapi.DeviceRequest{request("gpu", 1), request("mig", 1)} {
		for name := s.allocate(r); name != ""; name = s.allocate(r) {
			got.Insert(name)
		}
	}
	if both := got.Intersection(bad); len(both) > 0 {
		t.Errorf("allocated tainted devices %v", sets.List(both))
	}
	// The fourth GPU is in order, the first has a static partition and room beside
	// what is pending, the second has its static partition only, under a release
	// that is pending, and the third has nothing.
	want := sets.New("gpu-0000-42-00-0", "gpu-0000-1b-00-0-mig-3g40gb-0-static", "gpu-0000-1b-00-0-mig-1g10gb-6")
	if !got.Equal(want) {
		t.Errorf("allocated %v, want %v", sets.List(got), sets.List(want))
	}

	tolerant := request("gpu", 1, `device.attributes["resource.kubernetes.io"].pciBusID == "`+thirdGPU+`"`)
	if got := newScheduler(t, objects).allocate(tolerant); got != "" {
		t.Errorf("allocated %q without a toleration", got)
	}
	for _, reason := range []Reason{Gone, Lost, Occupied, ReleasePending, ResetRequired, Unresponsive} {
		tolerant.Exactly.Tolerations = append(tolerant.Exactly.Tolerations, resourceapi.DeviceToleration{
			Key: testOptions.Driver + "/" + string(reason), Operator: resourceapi.DeviceTolerationOpExists,
		})
	}
	if got := newScheduler(t, objects).allocate(tolerant); got != "gpu-0000-35-00-0" {
		t.Errorf("allocated %q with all tolerations", got)
	}
}

// TestAllocatorTolerations: claims that were written for NVIDIA's driver, with its keys, get
// what is tainted for the same cause; what is only told keeps nobody away.
func TestAllocatorTolerations(t *testing.T) {
	exists := func(key string) resourceapi.DeviceToleration {
		return resourceapi.DeviceToleration{Key: key, Operator: resourceapi.DeviceTolerationOpExists}
	}
	xid := func(value string) resourceapi.DeviceToleration {
		return resourceapi.DeviceToleration{Key: "gpu.nvidia.com/xid", Operator: resourceapi.DeviceTolerationOpEqual, Value: value}
	}
	lost := Condition{PCIAddress: firstGPU, Reason: Lost}
	contained := Condition{PCIAddress: firstGPU, Reason: XID, Value: "94"}
	fallen := Condition{PCIAddress: firstGPU, Reason: XID, Value: "79", Effect: policy.EffectNoExecute}
	unmonitored := Condition{PCIAddress: firstGPU, Reason: Unmonitored, Effect: policy.EffectNone}
	for name, tc := range map[string]struct {
		condition   Condition
		tolerations []resourceapi.DeviceToleration
		want        bool
	}{
		"lost":                        {lost, nil, false},
		"lost, tolerated":             {lost, []resourceapi.DeviceToleration{exists("gpu.nvidia.com/gpu-lost")}, true},
		"lost, another is tolerated":  {lost, []resourceapi.DeviceToleration{exists("gpu.nvidia.com/xid")}, false},
		"an XID":                      {contained, nil, false},
		"an XID, tolerated":           {contained, []resourceapi.DeviceToleration{exists("gpu.nvidia.com/xid")}, true},
		"this XID is tolerated":       {contained, []resourceapi.DeviceToleration{xid("94")}, true},
		"another XID is tolerated":    {contained, []resourceapi.DeviceToleration{xid("48")}, false},
		"a grave XID":                 {fallen, nil, false},
		"a grave XID, tolerated":      {fallen, []resourceapi.DeviceToleration{exists("gpu.nvidia.com/xid")}, true},
		"unmonitored, nothing needed": {unmonitored, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			i := mustInventory(t, loadNode(t, "h100-80-sxm")).With(Status{Conditions: []Condition{tc.condition}})
			r := request("gpu", 1)
			r.Exactly.Tolerations = tc.tolerations
			if got := newScheduler(t, i.ResourceSlices(testOptions)).allocate(r); (got != "") != tc.want {
				t.Errorf("allocated %q, want a device: %t", got, tc.want)
			}
		})
	}
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
