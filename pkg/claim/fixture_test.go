// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"strconv"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

const (
	driverName = "gpu.nvidia.com"
	poolName   = "node-1"

	// pciA and pciB divide without a reset, pciC has no MIG. Minors are not in
	// their order.
	pciA = "0000:1b:00.0"
	pciB = "0000:43:00.0"
	pciC = "0000:52:00.0"

	wholeA = "gpu-0000-1b-00-0"
	wholeB = "gpu-0000-43-00-0"
	wholeC = "gpu-0000-52-00-0"
	// sliceA0 and its like are 1g partitions, named by GPU and placement.
	sliceA0 = wholeA + "-mig-1g10gb-0"
	sliceA1 = wholeA + "-mig-1g10gb-1"
	sliceA4 = wholeA + "-mig-1g10gb-4"
	halfA0  = wholeA + "-mig-3g40gb-0"
	halfA4  = wholeA + "-mig-3g40gb-4"
	sliceB0 = wholeB + "-mig-1g10gb-0"
	// staticA0 is what a foreign partition in the place of sliceA0 is.
	staticA0 = sliceA0 + "-static"
)

func testNode() *gpu.Node {
	mig := func() *gpu.MIG {
		slice := gpu.Profile{ID: 19, Name: "1g.10gb", Slices: 1, MaxInstances: 7, Resources: gpu.Resources{MemoryBytes: 10 << 30}}
		for start := range 7 {
			slice.Placements = append(slice.Placements, gpu.Placement{Start: start, Size: 1})
		}
		half := gpu.Profile{ID: 9, Name: "3g.40gb", Slices: 3, MaxInstances: 2, Resources: gpu.Resources{MemoryBytes: 40 << 30},
			Placements: []gpu.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}}
		return &gpu.MIG{Dynamic: true, MemorySlices: 8, Profiles: []gpu.Profile{half, slice}}
	}
	return &gpu.Node{
		DriverVersion: "580.95.05",
		GPUs: []gpu.GPU{
			{PCIAddress: pciA, UUID: "GPU-a", Minor: 2, ComputeCapability: gpu.Version{Major: 9}, Resources: gpu.Resources{MemoryBytes: 80 << 30}, ProductName: "NVIDIA H100", Architecture: "Hopper", MIG: mig()},
			{PCIAddress: pciB, UUID: "GPU-b", Minor: 0, ComputeCapability: gpu.Version{Major: 9}, Resources: gpu.Resources{MemoryBytes: 80 << 30}, ProductName: "NVIDIA H100", Architecture: "Hopper", MIG: mig()},
			{PCIAddress: pciC, UUID: "GPU-c", Minor: 1, ComputeCapability: gpu.Version{Major: 8, Minor: 9}, Resources: gpu.Resources{MemoryBytes: 24 << 30}, ProductName: "NVIDIA L4", Architecture: "Ada Lovelace"},
		},
	}
}

func testInventory(t testing.TB) *device.Inventory {
	t.Helper()
	inventory, err := device.NewInventory(testNode(), device.Terms{Policy: testPolicy(), Limited: true})
	if err != nil {
		t.Fatal(err)
	}
	return inventory
}

// testPolicy offers everything, shares of small partitions included. All that takes
// turns does so with a short interval.
func testPolicy() *policy.Policy {
	p := policy.Builtin()
	p.Default.TimeSlice.Interval = policy.IntervalShort
	p.Default.Partition.Shares = []policy.PartitionShares{{
		Profiles: []string{"1g.10gb"}, MPS: p.Default.MPS,
		TimeSlice: &policy.TimeSliceOffer{Clients: 4, Interval: policy.IntervalDefault, MemoryOvercommit: 1},
	}}
	return p
}

// TestMain keeps what the many deaths have to say off the screen.
func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	m.Run()
}

// newClaim allocates devices, one request each: r0, r1, … A share has an ID.
func newClaim(uid string, devices ...string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-" + uid, UID: types.UID(uid)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for i, d := range devices {
		r := result("r"+strconv.Itoa(i), d)
		if r.ShareID != nil {
			*r.ShareID = types.UID("share-" + uid + "-" + r.Request)
		}
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, r)
	}
	return claim
}

func result(request, device string) resourceapi.DeviceRequestAllocationResult {
	r := resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driverName, Pool: poolName, Device: device}
	if strings.HasSuffix(device, "-mps") || strings.HasSuffix(device, "-timeslice") {
		id := types.UID("share-" + request)
		r.ShareID = &id
	}
	return r
}

func configure(claim *resourceapi.ResourceClaim, source resourceapi.AllocationConfigSource, text string, requests ...string) *resourceapi.ResourceClaim {
	claim.Status.Allocation.Devices.Config = append(claim.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(text)},
		}},
	})
	return claim
}

func admin(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	yes := true
	for i := range claim.Status.Allocation.Devices.Results {
		claim.Status.Allocation.Devices.Results[i].AdminAccess = &yes
	}
	return claim
}
