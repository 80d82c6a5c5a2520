// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// observed is a result with admin access.
func observed(request, device string) resourceapi.DeviceRequestAllocationResult {
	r := result(request, device)
	r.AdminAccess = ptr.To(true)
	return r
}

// TestObserverDoesNotConfigure: what a claim's request with admin access brings along, from its
// class or from the claim, changes nothing of the same device that another of its requests has.
func TestObserverDoesNotConfigure(t *testing.T) {
	share := result("use", mpsA)
	share.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("10Gi"), "smPercent": resource.MustParse("50")}
	watchedShare := observed("watch", mpsA)
	watchedShare.ShareID = share.ShareID
	both := []resourceapi.DeviceRequestAllocationResult{observed("watch", wholeA), result("use", wholeA)}
	const limits = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{` +
		`"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi"}}}`
	cases := 0
	for name, test := range map[string]struct {
		results   []resourceapi.DeviceRequestAllocationResult
		configure func(*resourceapi.ResourceClaim)
	}{
		"the owner has MPS, the observer's class has none": {both, func(c *resourceapi.ResourceClaim) {
			configure(configure(c, fromClass, gpuConfig, "watch"), fromClaim, limits, "use")
		}},
		"the owner has none, the observer's class has MPS": {both, func(c *resourceapi.ResourceClaim) {
			configure(c, fromClass, gpuMPS, "watch")
		}},
		"classes with different settings": {both, func(c *resourceapi.ResourceClaim) {
			configure(configure(c, fromClass, gpuLong, "watch"), fromClass, gpuMPS, "use")
		}},
		"one for all requests": {both, func(c *resourceapi.ResourceClaim) {
			configure(c, fromClaim, gpuLong)
		}},
		"a share": {[]resourceapi.DeviceRequestAllocationResult{watchedShare, share}, func(c *resourceapi.ResourceClaim) {
			configure(c, fromClass, gpuPriority("BelowNormal"), "watch")
		}},
	} {
		// As if nobody observed.
		alone := withResults(test.results[1])
		test.configure(alone)
		want, err := planFor(t, alone)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		backwards := slices.Clone(test.results)
		slices.Reverse(backwards)
		for order, results := range map[string][]resourceapi.DeviceRequestAllocationResult{"observer first": test.results, "owner first": backwards} {
			cases++
			claim := withResults(results...)
			test.configure(claim)
			got, err := planFor(t, claim)
			if err != nil {
				t.Errorf("%s, %s: %v", name, order, err)
				continue
			}
			for i := range got.Devices {
				got.Devices[i].Requests = slices.DeleteFunc(got.Devices[i].Requests, func(r string) bool { return r == "watch" })
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s, %s: the observer changes what the owner gets: -alone +observed:\n%s", name, order, diff)
			}
		}
	}
	if t.Logf("%d cases", cases); cases != 10 {
		t.Errorf("%d cases", cases)
	}
}
