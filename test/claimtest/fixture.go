// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package claimtest has the GPUs, devices and claims that the tests of claims use.
package claimtest

import (
	"strconv"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// Names of the driver, the node's pool, GPUs and devices.
const (
	DriverName = "gpu.nvidia.com"
	PoolName   = "node-1"

	// PCIA and PCIB divide without a reset, PCIC has no MIG. Minors are not in
	// their order.
	PCIA = "0000:1b:00.0"
	PCIB = "0000:43:00.0"
	PCIC = "0000:52:00.0"

	WholeA = "gpu-0000-1b-00-0"
	WholeB = "gpu-0000-43-00-0"
	WholeC = "gpu-0000-52-00-0"
	// SliceA0 and its like are 1g partitions, named by GPU and placement.
	SliceA0 = WholeA + "-mig-1g10gb-0"
	SliceA1 = WholeA + "-mig-1g10gb-1"
	SliceA4 = WholeA + "-mig-1g10gb-4"
	HalfA0  = WholeA + "-mig-3g40gb-0"
	HalfA4  = WholeA + "-mig-3g40gb-4"
	SliceB0 = WholeB + "-mig-1g10gb-0"
	// StaticA0 is what a foreign partition in the place of SliceA0 is.
	StaticA0 = SliceA0 + "-static"

	MPSA        = WholeA + "-mps"
	MPSB        = WholeB + "-mps"
	TurnsA      = WholeA + "-timeslice"
	TurnsC      = WholeC + "-timeslice"
	MPSSliceA0  = SliceA0 + "-mps"
	TurnSliceA0 = SliceA0 + "-timeslice"
)

// Sources of configurations.
const (
	FromClass = resourceapi.AllocationConfigSourceClass
	FromClaim = resourceapi.AllocationConfigSourceClaim
)

// Configurations.
const (
	GPUConfig = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`
	MIGConfig = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig"}`
	// GPUSlicing asks for nothing either, but can be told apart.
	GPUSlicing = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`
	GPUMPS     = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`
	GPUBad     = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"Sometimes"}}`
	GPULong    = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`
	MIGMPS     = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{
		"defaultPinnedDeviceMemoryLimit":"4Gi","multiUser":true}}}`
	// OwnMPS limits the devices of a claim to different sizes.
	OwnMPS = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS",
	"mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi","defaultPerDevicePinnedMemoryLimit":{"1":"5Gi"}}}}`
)

// Share returns a claim with one share of a device.
func Share(uid, device string, capacity map[resourceapi.QualifiedName]string) *resourceapi.ResourceClaim {
	claim := Claim(uid, device)
	r := &claim.Status.Allocation.Devices.Results[0]
	id := types.UID("share-" + uid)
	r.ShareID, r.ConsumedCapacity = &id, map[resourceapi.QualifiedName]resource.Quantity{}
	for name, amount := range capacity {
		r.ConsumedCapacity[name] = resource.MustParse(amount)
	}
	return claim
}

// Node returns the facts of the three GPUs.
func Node() *gpu.Node {
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
			{PCIAddress: PCIA, UUID: "GPU-a", Minor: 2, ComputeCapability: gpu.Version{Major: 9}, Resources: gpu.Resources{MemoryBytes: 80 << 30}, ProductName: "NVIDIA H100", Architecture: "Hopper", MIG: mig()},
			{PCIAddress: PCIB, UUID: "GPU-b", Minor: 0, ComputeCapability: gpu.Version{Major: 9}, Resources: gpu.Resources{MemoryBytes: 80 << 30}, ProductName: "NVIDIA H100", Architecture: "Hopper", MIG: mig()},
			{PCIAddress: PCIC, UUID: "GPU-c", Minor: 1, ComputeCapability: gpu.Version{Major: 8, Minor: 9}, Resources: gpu.Resources{MemoryBytes: 24 << 30}, ProductName: "NVIDIA L4", Architecture: "Ada Lovelace"},
		},
	}
}

// Inventory returns what the node publishes under Policy.
func Inventory(t testing.TB) *device.Inventory {
	t.Helper()
	return must.Get(device.NewInventory(Node(), device.Terms{Policy: Policy(), Limited: true}))(t)
}

// Policy returns one that offers everything, shares of small partitions included. All that takes
// turns does so with a short interval.
func Policy() *policy.Policy {
	p := policy.Builtin()
	p.Default.TimeSlice.Interval = policy.IntervalShort
	p.Default.Partition.Shares = []policy.PartitionShares{{
		Profiles: []string{"1g.10gb"}, MPS: p.Default.MPS,
		TimeSlice: &policy.TimeSliceOffer{Clients: 4, Interval: policy.IntervalDefault, MemoryOvercommit: 1},
	}}
	return p
}

// Claim returns a claim with devices, one request each: r0, r1, … A share has an ID.
func Claim(uid string, devices ...string) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-" + uid, UID: types.UID(uid)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for i, d := range devices {
		r := Result("r"+strconv.Itoa(i), d)
		if r.ShareID != nil {
			*r.ShareID = types.UID("share-" + uid + "-" + r.Request)
		}
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, r)
	}
	return claim
}

// Result returns the allocation of a device to a request. A share has an ID.
func Result(request, device string) resourceapi.DeviceRequestAllocationResult {
	r := resourceapi.DeviceRequestAllocationResult{Request: request, Driver: DriverName, Pool: PoolName, Device: device}
	if strings.HasSuffix(device, "-mps") || strings.HasSuffix(device, "-timeslice") {
		id := types.UID("share-" + request)
		r.ShareID = &id
	}
	return r
}

// Configure adds a configuration to the allocation of a claim and returns it.
func Configure(claim *resourceapi.ResourceClaim, source resourceapi.AllocationConfigSource, text string, requests ...string) *resourceapi.ResourceClaim {
	claim.Status.Allocation.Devices.Config = append(claim.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: DriverName, Parameters: runtime.RawExtension{Raw: []byte(text)},
		}},
	})
	return claim
}

// Admin gives all results of a claim admin access and returns it.
func Admin(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	yes := true
	for i := range claim.Status.Allocation.Devices.Results {
		claim.Status.Allocation.Devices.Results[i].AdminAccess = &yes
	}
	return claim
}

// WantError fails the test unless the error contains all these texts.
func WantError(t testing.TB, err error, want ...string) {
	t.Helper()
	for _, text := range want {
		expect.Says(t, err, text)
	}
}
