// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package allocators runs what the driver publishes through the scheduler's allocators of
// older Kubernetes versions. See README.md.
package allocators

import (
	"errors"
	"os"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"
)

// faults are what an allocator gets wrong. pkg/device says what they mean.
type faults struct {
	IgnoresCounters bool `json:"ignoresCounters,omitempty"`
	ForgetsShares   bool `json:"forgetsShares,omitempty"`
	CrashesOnAll    bool `json:"crashesOnAll,omitempty"`
}

// TestFaults compares each two devices that a GPU is published as with what the counters
// say: one is allocated, then the other is asked for. Then all of them are asked for at
// once. The faults that this finds have to be those that the driver expects of the version.
func TestFaults(t *testing.T) {
	version := kubernetes(t)
	want := expectedFaults(t, version)

	var got faults
	pairs := 0
	for model, published := range goldenSlices(t) {
		devices, _ := split(published)
		for _, held := range devices {
			for _, wanted := range devices {
				if held.Name == wanted.Name {
					continue
				}
				pairs++
				s := newScheduler(published, held.Name, wanted.Name)
				s.hold(held)
				allocated, err := s.allocate(request("any"))
				switch allowed := compatible(held, wanted, published); {
				case err != nil:
					t.Errorf("%s: %s beside %s: %v", model, wanted.Name, held.Name, err)
				case allowed && len(allocated) == 0 && !want.IgnoresCounters:
					t.Errorf("%s: %s was refused beside %s", model, wanted.Name, held.Name)
				case !allowed && len(allocated) > 0 && !shared(held):
					got.IgnoresCounters = true
				case !allowed && len(allocated) > 0 && !want.IgnoresCounters:
					got.ForgetsShares = true
				}
			}
		}
		all := request("any")
		all.Exactly.AllocationMode, all.Exactly.Count = resourceapi.DeviceAllocationModeAll, 0
		first := devices[:min(len(devices), resourceapi.AllocationResultsMaxSize)]
		_, err := newScheduler(published, names(first)...).allocate(all)
		got.CrashesOnAll = got.CrashesOnAll || errors.As(err, new(errPanic))
	}
	t.Logf("Kubernetes %s: %d cases: %+v", version, pairs, got)
	if got != want {
		t.Errorf("Kubernetes %s: got %+v, the driver expects %+v", version, got, want)
	}
	if pairs < 2000 {
		t.Errorf("only %d cases", pairs)
	}
}

// expectedFaults are those that the driver expects of the version.
func expectedFaults(t *testing.T, version string) faults {
	t.Helper()
	data, err := os.ReadFile("../../pkg/device/testdata/schedulers.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var expected map[string]faults
	if err := yaml.UnmarshalStrict(data, &expected); err != nil {
		t.Fatal(err)
	}
	want, known := expected[version]
	if !known {
		t.Fatalf("schedulers.yaml does not have Kubernetes %s", version)
	}
	return want
}

// TestOneAttempt asks for two kinds of devices of one GPU in one pod, with a scheduler that
// has not allocated anything yet.
func TestOneAttempt(t *testing.T) {
	if version := kubernetes(t); version < "1.35" {
		t.Skipf("Kubernetes %s ignores counters", version)
	}
	for _, model := range []string{"h100-80-sxm", "t4"} {
		published := goldenSlices(t)[model]
		seen := map[string]string{}
		devices, _ := split(published)
		for _, d := range devices {
			seen[kind(d)] = d.Name
		}
		for a, first := range seen {
			for b, second := range seen {
				if a == b {
					continue
				}
				if got, err := newScheduler(published, first, second).allocate(request(a), request(b)); err != nil || len(got) > 0 {
					t.Errorf("%s: %s and %s in one pod: %v, %v", model, a, b, got, err)
				}
			}
		}
	}
}

// TestObservers: a claim with admin access gets the observer of a GPU, whatever is
// allocated of it, and no other claim does.
func TestObservers(t *testing.T) {
	if version := kubernetes(t); version < "1.35" {
		t.Skipf("nothing that draws on counters is published on Kubernetes %s, and no observers", version)
	}
	tried := 0
	for model, published := range goldenSlices(t) {
		devices, observers := split(published)
		if len(observers) != 1 {
			t.Fatalf("%s has %d observers", model, len(observers))
		}
		observer := observers[0].Name
		for _, held := range devices {
			tried++
			s := newScheduler(published, held.Name, observer)
			s.hold(held)
			if got, err := s.allocate(request("observer")); err != nil || len(got) > 0 {
				t.Errorf("%s: without admin access: %v, %v", model, got, err)
			}
			admin := request("observer")
			admin.Exactly.AllocationMode, admin.Exactly.Count = resourceapi.DeviceAllocationModeAll, 0
			admin.Exactly.AdminAccess = ptr(true)
			admin.Exactly.Tolerations = []resourceapi.DeviceToleration{{Key: driver + "/admin-access", Operator: resourceapi.DeviceTolerationOpExists}}
			if got, err := s.allocate(admin); err != nil || len(got) != 1 || got[0] != observer {
				t.Errorf("%s: beside %s: %v, %v", model, held.Name, got, err)
			}
		}
	}
	if tried < 100 {
		t.Errorf("only %d cases", tried)
	}
}

// split separates what claims use from what they observe.
func split(published []resourceapi.ResourceSlice) (used, observers []resourceapi.Device) {
	for _, slice := range published {
		for _, d := range slice.Spec.Devices {
			if kind(d) == "observer" {
				observers = append(observers, d)
			} else {
				used = append(used, d)
			}
		}
	}
	return used, observers
}

func names(devices []resourceapi.Device) []string {
	var all []string
	for _, d := range devices {
		all = append(all, d.Name)
	}
	return all
}
