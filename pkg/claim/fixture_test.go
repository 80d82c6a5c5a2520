// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"strconv"
	"testing"

	"github.com/go-logr/logr"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
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
			{PCIAddress: pciA, UUID: "GPU-a", Minor: 2, ProductName: "NVIDIA H100", Architecture: "Hopper", MIG: mig()},
			{PCIAddress: pciB, UUID: "GPU-b", Minor: 0, ProductName: "NVIDIA H100", Architecture: "Hopper", MIG: mig()},
			{PCIAddress: pciC, UUID: "GPU-c", Minor: 1, ProductName: "NVIDIA L4", Architecture: "Ada Lovelace"},
		},
	}
}

func testInventory(t testing.TB) *device.Inventory {
	t.Helper()
	inventory, err := device.NewInventory(testNode(), device.Terms{})
	if err != nil {
		t.Fatal(err)
	}
	return inventory
}

// TestMain keeps what the many deaths have to say off the screen.
func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	m.Run()
}

// newClaim allocates devices, one request each: r0, r1, …
func newClaim(uid string, devices ...string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-" + uid, UID: types.UID(uid)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for i, d := range devices {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, result("r"+strconv.Itoa(i), d))
	}
	return claim
}

func result(request, device string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driverName, Pool: poolName, Device: device}
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
