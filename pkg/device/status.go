// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import "github.com/partage-dev/partage/pkg/gpu"

// Status is what is the case on a node's GPUs at one moment and keeps devices
// from being allocated, or adds some. Its zero value is a node on which all is
// well and everything was made by this driver.
type Status struct {
	Static     []Static
	Conditions []Condition
}

// Static is a partition that somebody else made. It is published as a device of
// its own, with its UUID; claims use it as it is, and this driver never changes
// it. The devices that overlap it are tainted while it exists.
type Static struct {
	PCIAddress string
	ProfileID  uint32
	Placement  gpu.Placement
	// UUID is the MIG device's.
	UUID string
	// Gone says that it does not exist any more and that a claim still has it:
	// the device stays, because an allocated device must not disappear, and is
	// tainted.
	Gone bool
}

// Condition is a reason against allocating some devices of a GPU. They stay
// published and are tainted with the effect NoSchedule.
type Condition struct {
	PCIAddress string
	// Where limits it to the devices that overlap with these memory slices; nil
	// means all devices of the GPU.
	Where *gpu.Placement
	// Reason is the name part of the taint's key, after the driver's domain.
	Reason Reason
	// Message is for people: what is the case, and what can be done about it. It
	// does not fit into a taint.
	Message string
}

// Reason names a condition.
type Reason string

const (
	// Occupied: an instance that this driver did not make is in the place.
	Occupied Reason = "occupied"
	// ReleasePending: what a claim had could not be removed yet.
	ReleasePending Reason = "release-pending"
	// Unresponsive: the GPU does not answer, or a call on it has not returned.
	Unresponsive Reason = "unresponsive"
	// Lost: the GPU has fallen off the bus or is not there any more.
	Lost Reason = "lost"
	// ResetRequired: the GPU does nothing until it is reset.
	ResetRequired Reason = "reset-required"
	// Gone: a static device whose partition does not exist any more.
	Gone Reason = "gone"
)
