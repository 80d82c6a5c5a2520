// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
)

// observing asks for all devices of a class with admin access, and tolerates what
// observers are tainted with.
func observing(class string) resourceapi.DeviceRequest {
	r := request(class, 0)
	r.Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	r.Exactly.AdminAccess = new(true)
	r.Exactly.Tolerations = []resourceapi.DeviceToleration{{
		Key: testOptions.Driver + "/" + string(AdminAccess), Operator: resourceapi.DeviceTolerationOpExists,
	}}
	return r
}

// TestAllocatorObservers: a claim with admin access gets an observer of every GPU,
// whatever others have and in whatever condition the GPUs are, and as many such claims
// as want one. Without observers it gets nothing as soon as one device is allocated.
func TestAllocatorObservers(t *testing.T) {
	want := [][]string{{"gpu-0000-1b-00-0-observer", "gpu-0000-28-00-0-observer"}}
	for _, board := range []string{"t4", "h100-80-sxm", "a100-80-mig"} {
		i := mustInventory(t, replicate(loadNode(t, board), 2))
		tried := 0
		for _, d := range i.Devices() {
			s := newScheduler(t, i.ResourceSlices(testOptions)).holding(d.Name)
			if got, err := s.try(observing("observer")); err != nil || !cmp.Equal(got, want) {
				t.Errorf("%s, %s is allocated: got %v, %v", board, d.Name, got, err)
			}
			if got, err := s.try(observing("observer"), observing("observer")); err != nil || len(got) != 2 {
				t.Errorf("%s, two observing claims: got %v, %v", board, got, err)
			}
			tried++
		}
		if tried < 6 {
			t.Errorf("%s: only %d devices", board, tried)
		}
		lost := i.With(Status{Conditions: []Condition{onGPU(firstGPU, Lost)}})
		if got, err := newScheduler(t, lost.ResourceSlices(testOptions)).try(observing("observer")); err != nil || !cmp.Equal(got, want) {
			t.Errorf("%s, a GPU is lost: got %v, %v", board, got, err)
		}
	}

	// This is why: the library counts what admin access does not use.
	i := mustInventory(t, replicate(loadNode(t, "h100-80-sxm"), 2))
	s := newScheduler(t, i.ResourceSlices(testOptions)).holding("gpu-0000-1b-00-0")
	if got, err := s.try(observing("gpu")); err != nil || got != nil {
		t.Errorf("observers are not needed any more: admin access to GPUs in use got %v, %v", got, err)
	}
}

// TestAllocatorObserversAreForNobodyElse: no request gets an observer unless it
// tolerates the taint, and none that asks for anything of a GPU even then.
func TestAllocatorObserversAreForNobodyElse(t *testing.T) {
	i := mustInventory(t, loadNode(t, "t4"))
	s := newScheduler(t, i.ResourceSlices(testOptions)).only("gpu-0000-1b-00-0-observer")
	for _, class := range []string{"any", "observer"} {
		expect.Same(t, s.allocate(request(class, 1)), "", "class "+class)
	}
	for _, demand := range []string{
		`device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("1")) >= 0`,
		`device.capacity["gpu.nvidia.com"].multiprocessors.compareTo(quantity("1")) >= 0`,
		`device.attributes["gpu.nvidia.com"].isolation == "hardware"`,
	} {
		r := observing("any")
		r.Exactly.AdminAccess, r.Exactly.Selectors = nil, celSelectors(demand)
		if got, err := s.try(r); err != nil || got != nil {
			t.Errorf("%s: got %v, %v", demand, got, err)
		}
	}
	// Classes ask for a type, so that all of their devices are without observers.
	whole := request("gpu", 0)
	whole.Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	if got, err := newScheduler(t, i.ResourceSlices(testOptions)).try(whole); err != nil || !cmp.Equal(got, [][]string{{"gpu-0000-1b-00-0"}}) {
		t.Errorf("all whole GPUs: got %v, %v", got, err)
	}
}

// TestObservers: a GPU has one where anything is published that draws on counters, and
// it is found after it was published.
func TestObservers(t *testing.T) {
	const name = "gpu-0000-1b-00-0-observer"
	whole := offering(func(o *policy.Offer) { *o = policy.Offer{Whole: true} })
	nothing := offering(func(o *policy.Offer) { *o = policy.Offer{} })
	noCounters := testOptions
	noCounters.PartitionableDevices = false
	for what, tc := range map[string]struct {
		terms   Terms
		options Options
		want    bool
	}{
		"by default":           {Terms{}, testOptions, true},
		"whole GPUs":           {whole, testOptions, true},
		"a GPU left alone":     {nothing, testOptions, false},
		"no counters anywhere": {Terms{}, noCounters, false},
	} {
		i := inventoryOf(t, loadNode(t, "h100-80-sxm"), tc.terms)
		found := false
		for _, slice := range i.ResourceSlices(tc.options) {
			for _, d := range slice.Spec.Devices {
				if d.Name == name {
					found = true
				}
			}
		}
		expect.Same(t, found, tc.want, what+": published")
		if d, ok := i.Lookup(name); !ok || d.Kind != Observer || d.GPU.PCIAddress != firstGPU {
			t.Errorf("%s: found %+v, %t", what, d, ok)
		}
	}
}
