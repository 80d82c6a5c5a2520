// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import "time"

// EventKind says what an [Event] is about.
type EventKind string

const (
	// EventXID is an error that the driver gave a number, an XID. See
	// https://docs.nvidia.com/deploy/xid-errors.
	EventXID EventKind = "XID"
	// EventUncorrectedECC is a memory error that ECC could not correct.
	EventUncorrectedECC EventKind = "UncorrectedECC"
	// EventLost says that the GPU has fallen off the bus, or that the driver calls it
	// unavailable.
	EventLost EventKind = "Lost"
	// EventReset says that the GPU was reset, or its driver loaded anew, while its events were
	// received.
	EventReset EventKind = "Reset"
	// EventRecoveryAction says that the recovery action of the GPU has changed; read it
	// with Health.
	EventRecoveryAction EventKind = "RecoveryAction"
)

// Event is something that the driver reports about a GPU when it happens.
type Event struct {
	// Time is when it was received, NotBefore when the driver last had no event to report: it
	// happened between them. That is seconds, or longer while waiting for events hangs.
	Time, NotBefore time.Time
	PCIAddress      string
	Kind            EventKind
	// XID is the number of an EventXID.
	XID uint64
	// InstanceID and ComputeInstanceID are those of the partition that is affected, or -1:
	// without a GPU instance all of the GPU is affected, without a compute instance all of
	// the GPU instance. They are valid at the time of the event only; see Instance.IDSince.
	InstanceID, ComputeInstanceID int
}

// RecoveryAction is what the driver wants to be done about a GPU.
type RecoveryAction string

// Values of RecoveryAction that are told apart, as nvidia-smi -q names them. There are more.
const (
	RecoveryNone  RecoveryAction = "None"
	RecoveryReset RecoveryAction = "Reset"
)

// Throttling is a reason for which clocks are lower than they could be and which means
// that something is wrong: heat, or power that the board or the machine cannot give.
type Throttling string

// Values of Throttling.
const (
	ThrottlingHardwareThermal Throttling = "HardwareThermalSlowdown"
	ThrottlingSoftwareThermal Throttling = "SoftwareThermalSlowdown"
	ThrottlingPowerBrake      Throttling = "PowerBrakeSlowdown"
)

// Health is what a GPU reports about its own state at one moment. What the GPU or its
// driver does not report is nil or empty.
type Health struct {
	RecoveryAction RecoveryAction
	// UncorrectedECC counts memory errors since the driver was loaded or the GPU was reset.
	UncorrectedECC *uint64
	// RepairPending says that the driver will repair memory or multiprocessors at the next reset of the GPU:
	// rows of memory will be replaced by spare ones or, on GPUs before Ampere, pages retired.
	RepairPending bool
	// RowRemapFailed says that a row of memory could not be replaced.
	RowRemapFailed bool
	// Unrepairable says that memory is broken for good.
	Unrepairable bool
	// FabricUnhealthy describes what is wrong with the connection to the NVLink fabric;
	// empty if nothing is, or if there is none.
	FabricUnhealthy string
	// FabricPending says how far the registration with the NVLink fabric is, as nvidia-smi -q does; empty
	// if it is done, if there is no fabric, or in MIG mode, in which the driver does not register.
	// CUDA programs do not start until it is done.
	FabricPending string
	Throttling    []Throttling
	// Temperature is in degrees Celsius.
	Temperature *int
}
