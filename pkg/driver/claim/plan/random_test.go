// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
)

// pick returns one of several values.
func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// randomClaim is allocated devices as no scheduler would: any names, shares of what is not
// shared, amounts of any size, configurations for requests that there are and are not.
func randomClaim(r *rand.Rand, devices []string) *resourceapi.ResourceClaim {
	claim := newClaim("u1")
	for i := range 1 + r.IntN(5) {
		request := fmt.Sprintf("r%d%s", i, pick(r, "", "", "", "/a", "/b"))
		one := resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driverName, Pool: poolName, Device: pick(r, devices...)}
		if r.IntN(2) == 0 {
			one.ShareID = ptr.To(types.UID(pick(r, "s0", "s1", "s2")))
		}
		if r.IntN(5) == 0 {
			one.AdminAccess = ptr.To(true)
		}
		for _, name := range []resourceapi.QualifiedName{"memory", "smPercent", "shares", driverName + "/memory"} {
			if r.IntN(4) == 0 {
				if one.ConsumedCapacity == nil {
					one.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{}
				}
				one.ConsumedCapacity[name] = resource.MustParse(pick(r, "0", "1", "-1", "8Ei", "1500m", "9223372036854775807", "16Ei", "1Ki", "10Gi", "101", "1e30", "2Mi", "50"))
			}
		}
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, one)
	}
	for range r.IntN(3) {
		var requests []string
		if r.IntN(2) == 0 {
			requests = []string{fmt.Sprintf("r%d", r.IntN(4))}
		}
		configure(claim, pick(r, fromClaim, fromClass), pick(r, gpuConfig, migConfig, gpuSlicing, gpuMPS, gpuBad, gpuLong, migMPS, ownMPS,
			"", "null", "{}", "[]", `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig"}`), requests...)
	}
	return claim
}

// limitsIn are the limits of a record's shares.
func limitsIn(r *record.Record) (all []record.Limits) {
	for _, d := range r.Devices {
		if d.Type.IsShare() && d.Sharing != nil && (d.Sharing.Session != "" || d.Sharing.Limited) {
			all = append(all, d.Sharing.Limits)
		}
	}
	return all
}

// TestRandomAllocations: whatever stands in an allocation, a plan is refused or is one that the
// store reads again as it was, in which all limits are limits.
func TestRandomAllocations(t *testing.T) {
	inventory := testInventory(t).With(device.Status{Static: []device.Static{
		{PCIAddress: pciA, ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}, UUID: "MIG-foreign"},
	}})
	names := []string{wholeA + "-observer", "", "gpu-x", "../x"}
	for _, d := range inventory.Devices() {
		names = append(names, d.Name)
	}
	store, err := record.Open(t.TempDir(), "boot-1", record.OS{})
	if err != nil {
		t.Fatal(err)
	}
	planned, refused, limited := 0, 0, 0
	for seed := range uint64(6000) {
		claim := randomClaim(rand.New(rand.NewPCG(seed, 0)), names)
		p, err := New(claim, Node{Driver: driverName, Pool: poolName, BootID: "boot-1", Inventory: inventory})
		if err != nil {
			refused++
			continue
		}
		planned++
		if err := store.Put(p, func(r *record.Record) error { *r = *p.Clone(); return nil }); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		read, err := store.Read("u1")
		if err != nil {
			t.Fatalf("seed %d: the record cannot be read: %v", seed, err)
		}
		if diff := cmp.Diff(p, read, cmpopts.IgnoreFields(record.Device{}, "Clients")); diff != "" { // which is not written down
			t.Fatalf("seed %d: something else is read: -written +read:\n%s", seed, diff)
		}
		for _, l := range limitsIn(p) {
			limited++
			if l.Percent < 0 || l.Percent > 100 || l.MemoryBytes < 1<<20 {
				t.Errorf("seed %d: limits that are none: %+v", seed, l)
			}
		}
	}
	if t.Logf("%d cases: %d planned, %d refused, %d limits", planned+refused, planned, refused, limited); planned < 500 || refused < 1000 || limited < 250 {
		t.Error("too few of one kind")
	}
}
