// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fleet reads what a cluster has that concerns GPUs, and makes a model of it: nodes,
// their GPUs, the devices of each, and which claims and pods have them.
//
// A Snapshot is what was read, a Model what follows from it. Both are never changed once they
// are made, so that any number of goroutines may read them.
package fleet

import (
	"iter"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// Model is what a driver's part of a Snapshot means.
type Model struct {
	*Snapshot
	// Driver is the one whose devices the model has.
	Driver string
	// Nodes are those with devices of the driver, by name.
	Nodes []*Node
	// Holdings are all that claims have of the driver's devices, in the order of claims.
	Holdings []*Holding
}

// GPUs goes through those of all nodes.
func (m *Model) GPUs() iter.Seq[*GPU] {
	return func(yield func(*GPU) bool) {
		for _, n := range m.Nodes {
			for _, g := range n.GPUs {
				if !yield(g) {
					return
				}
			}
		}
	}
}

// Devices goes through those of all GPUs.
func (m *Model) Devices() iter.Seq[*Device] {
	return func(yield func(*Device) bool) {
		for g := range m.GPUs() {
			for _, d := range g.Devices {
				if !yield(d) {
					return
				}
			}
		}
	}
}

// Node is a node with devices of the driver.
type Node struct {
	Name string
	// Object is nil if it could not be read, or does not exist.
	Object *corev1.Node
	// GPUs are in the order of their PCI addresses.
	GPUs []*GPU
	// Incomplete says that not all slices of the pool's newest generation are there: the
	// scheduler allocates nothing of it.
	Incomplete bool
	// Hidden says that claims or taint rules may exist that could not be read: what looks free may be taken.
	Hidden bool
	// AtLeast says that it is claims that could not be read: those that are known to share a device are not all that may.
	AtLeast bool
}

// GPU is a physical GPU with all devices that the driver offers of it.
type GPU struct {
	Node *Node
	// Index is its place among the GPUs of its node.
	Index int
	// Name is that of its counter set, and of the device that is the whole GPU: gpu-0000-1b-00-0.
	Name                                 string
	UUID, ProductName, Architecture      string
	PCIBusID, DriverVersion, CUDAVersion string
	// MemoryBytes is what the GPU offers, 0 if unknown.
	MemoryBytes int64
	// Cells are the memory slices that have a counter of their own, by index; none if the GPU cannot be
	// partitioned. A slice that no partition has without the one
	// before it has no counter and is part of that one's cell: of the eight slices of an H100
	// seven have a counter, of the twelve of an RTX PRO 6000 four.
	Cells []int
	// Devices are all that the slices have, in their order: that of preference.
	Devices []*Device

	// counters are what the devices draw from together, in thousandths.
	counters map[string]int64
}

// Types of devices.
const (
	TypeGPU       = "gpu"
	TypeMIG       = "mig"
	TypeMPS       = "mps"
	TypeTimeSlice = "timeslice"
	TypeObserver  = "observer"
)

// KindText is what people call a device of a type and profile: the profile of a partition says its type.
func KindText(kind, profile string) string {
	if kind == TypeMIG && profile != "" {
		return profile
	}
	return strings.TrimSpace(profile + " " + kind)
}

// Capacities of devices that the commands speak of.
const (
	CapacityMemory    = "memory"
	CapacityShares    = "shares"
	CapacitySMPercent = "smPercent"
)

// Device is one of a GPU. It is one of the kinds that the attribute "type" names.
type Device struct {
	GPU *GPU
	// Pool and Name identify it, together with the driver.
	Pool, Name string
	// Type is gpu, mig, mps, timeslice or observer; Profile is that of a partition, or of the
	// partition that is shared.
	Type, Profile string
	// UUID is "" for a partition that does not exist yet.
	UUID string
	// Isolation is the attribute.
	Isolation string
	// Placement are the memory slices that it uses, by index. It is empty where the device is
	// the whole GPU and on GPUs that cannot be partitioned.
	Placement []int
	// Taints are those of the slice and of DeviceTaintRules.
	Taints []resourceapi.DeviceTaint
	// Holdings are the claims that have it.
	Holdings []*Holding
	// Published is the device as it is in its slice.
	Published *resourceapi.Device
}

// Shared reports whether several claims can have the device at once.
func (d *Device) Shared() bool { return ptr.Deref(d.Published.AllowMultipleAllocations, false) }

// Tainted reports whether a taint keeps the device from claims that do not tolerate it.
func (d *Device) Tainted() bool {
	return slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone })
}

// Held returns the claims that take the device from others: all but those with admin access.
func (d *Device) Held() []*Holding {
	return slices.DeleteFunc(slices.Clone(d.Holdings), (*Holding).Admin)
}

// Admin reports whether the claim has the device beside those who use it.
func (h *Holding) Admin() bool { return ptr.Deref(h.Result.AdminAccess, false) }

// Alone reports whether others cannot have a share of the device.
func (h *Holding) Alone() bool { return h.Result.ShareID == nil }

// Holding is one device, or share of one, that is allocated to a claim.
type Holding struct {
	Claim *resourceapi.ResourceClaim
	// Result is the claim's.
	Result *resourceapi.DeviceRequestAllocationResult
	// Device is nil if no slice has it.
	Device *Device
	// Pods are those that the claim is reserved for and that could be read.
	Pods []*corev1.Pod
	// Status is the driver's entry in the claim's status, or nil.
	Status *resourceapi.AllocatedDeviceStatus
}
