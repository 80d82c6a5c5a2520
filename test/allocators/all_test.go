// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocators

import (
	"errors"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// TestAllDevices asks for all devices of a kind (allocationMode), in every way that an
// admission policy has to know: the schedulers of which the driver expects it crash where
// the devices draw on counters, and at nothing else. docs/how-to/slow-requests.md says what is
// refused because of this.
func TestAllDevices(t *testing.T) {
	version := kubernetes(t)
	want := expectedFaults(t, version)
	crashes, cases := 0, 0
	for model, published := range goldenSlices(t) {
		used, observers := split(published)
		first := map[string]resourceapi.Device{}
		for _, d := range slices.Concat(used, observers) {
			if _, found := first[kind(d)]; !found {
				first[kind(d)] = d
			}
		}
		for name, d := range first {
			for form, r := range requestsForAll(name) {
				cases++
				_, err := newScheduler(published, d.Name).allocate(r)
				crashed := errors.As(err, new(errPanic))
				if err != nil && !crashed {
					t.Errorf("%s, %s, %s: %v", model, name, form, err)
				}
				if crashed {
					crashes++
				}
				if draws := len(d.ConsumesCounters) > 0; crashed != (draws && want.CrashesOnAll) {
					t.Errorf("%s, %s, %s: crashed: %t, draws on counters: %t", model, name, form, crashed, draws)
				}
			}
		}
	}
	t.Logf("Kubernetes %s: crashes in %d of %d cases", version, crashes, cases)
	if cases < 100 || want.CrashesOnAll && crashes < 60 {
		t.Errorf("only %d cases and %d crashes", cases, crashes)
	}
}

// requestsForAll are the ways to ask for all devices of a class.
func requestsForAll(class string) map[string]resourceapi.DeviceRequest {
	tolerations := []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
	exact := request(class)
	exact.Exactly.AllocationMode, exact.Exactly.Count = resourceapi.DeviceAllocationModeAll, 0
	exact.Exactly.Tolerations = tolerations
	admin := *exact.DeepCopy()
	admin.Exactly.AdminAccess = ptr(true)
	return map[string]resourceapi.DeviceRequest{
		"exactly":      exact,
		"admin access": admin,
		"firstAvailable": {Name: "r", FirstAvailable: []resourceapi.DeviceSubRequest{{
			Name: "all", DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeAll, Tolerations: tolerations,
		}}},
	}
}
