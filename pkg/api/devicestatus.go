// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

const (
	// StatusVersion is the apiVersion of DeviceStatus. Fields may be added to a version;
	// programs that read it must pass over those that they do not know.
	StatusVersion = "status.partage.dev/v1alpha1"
	// DeviceStatusKind is the kind of DeviceStatus.
	DeviceStatusKind = "DeviceStatus"
)

// DeviceStatus is what the driver writes into status.devices[].data of a ResourceClaim: what is
// only known of a device while a claim has it prepared.
type DeviceStatus struct {
	metav1.TypeMeta `json:",inline"`

	// Type is the kind of the device, as in its attribute "type": gpu, mig, mps, timeslice or
	// observer.
	Type string `json:"type"`
	// UUID is that of the MIG device, or of the GPU where the claim's device spans it. It is
	// missing while there is no such device.
	UUID string `json:"uuid,omitempty"`
	// ParentUUID is the GPU's, also for devices that span it.
	ParentUUID string `json:"parentUUID,omitempty"`
	// PCIBusID is the GPU's PCI address.
	PCIBusID string `json:"pciBusID"`
	// MIG is missing where the device spans its GPU.
	MIG *MIGStatus `json:"mig,omitempty"`
	// Limits are missing where the claim may use all of the device.
	Limits *LimitsStatus `json:"limits,omitempty"`
	// MPS is missing where the processes of the claim do not use MPS.
	MPS *MPSStatus `json:"mps,omitempty"`
	// TimeSlice is how long a process may use the GPU before the next one, where that is set
	// for the claim: Short, Medium or Long.
	TimeSlice string `json:"timeSlice,omitempty"`
}

// MIGStatus describes a MIG partition.
type MIGStatus struct {
	// Profile is its name, such as 1g.10gb.
	Profile string `json:"profile"`
	// Placement is where it is on its GPU.
	Placement PlacementStatus `json:"placement"`
	// GPUInstanceID and ComputeInstanceID are those of NVML. They are missing while the
	// partition does not exist.
	GPUInstanceID     *int `json:"gpuInstanceID,omitempty"`
	ComputeInstanceID *int `json:"computeInstanceID,omitempty"`
}

// PlacementStatus are memory slices of a GPU.
type PlacementStatus struct {
	// Start is the first, counted from 0.
	Start int `json:"start"`
	// Size is the number of slices.
	Size int `json:"size"`
}

// LimitsStatus are the limits in effect for the processes of the claim. What is missing is not
// limited.
type LimitsStatus struct {
	// MemoryBytes is device memory. MPS counts in MiB, so that this may be a little less than
	// was asked for.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// SMPercent is the part of the multiprocessors that was asked for, in percent.
	SMPercent int `json:"smPercent,omitempty"`
	// Multiprocessors are what the hardware makes of SMPercent: MPS gives whole texture
	// processing clusters. It is missing where something else than MPS limits the claim.
	Multiprocessors int `json:"multiprocessors,omitempty"`
	// EffectiveSMPercent is the part of the device's multiprocessors that these are, in
	// percent, rounded down.
	EffectiveSMPercent int `json:"effectiveSMPercent,omitempty"`
}

// MPSStatus describes the MPS server of a device.
type MPSStatus struct {
	// Session is the name of the server's session on the node. Claims with the same share it.
	Session string `json:"session"`
	// ServersLost is how often processes have lost their server, which was then replaced,
	// since the session was started. Processes that ran at that time have failed.
	ServersLost int `json:"serversLost"`
	// ClientPriority is the priority of clients that do not set their own.
	ClientPriority ClientPriority `json:"clientPriority,omitempty"`
}
