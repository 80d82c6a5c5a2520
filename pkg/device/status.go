// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// Status describes the GPUs of a node at one moment: what adds devices, and what
// keeps some from being allocated. The order of the entries does not matter. The
// zero value is a healthy node without partitions that others made.
type Status struct {
	Static     []Static
	Conditions []Condition
}

// Static is a partition that somebody else made. It is published as a device of
// its own, with its UUID; claims use it as it is, and this driver never changes
// it. While it exists it counts as a [Condition] with the reason [Occupied].
//
// Where the inventory has no device for the same profile and placement, because
// there is no such thing or the policy does not offer it, there is no static device
// either, but the place is occupied all the same.
type Static struct {
	PCIAddress string
	ProfileID  uint32
	Placement  gpu.Placement
	// UUID is the MIG device's.
	UUID string
	// Gone says that the partition does not exist any more and that a claim still
	// has the device, which stays, because an allocated device must not disappear,
	// and is tainted. It occupies nothing. A partition that exists in the same
	// place with the same profile takes the device over.
	Gone bool
}

// Condition is something that is wrong with some devices of a GPU. They stay published
// and are tainted.
type Condition struct {
	PCIAddress string
	// Where limits it to the devices that overlap with these memory slices; nil
	// means all devices of the GPU. A static device is not tainted because of the
	// partition that it is itself.
	Where *gpu.Placement
	// Exact limits it further, to the devices that are at Where and have the profile: the
	// one partition that is there, and its shares. What overlaps it cannot be allocated
	// while a claim has it.
	Exact bool
	// ProfileID is the profile of the instance that lies at Where; nil where
	// there is none or it is not known. A partition elsewhere that needs an
	// engine which this instance uses up is tainted as well.
	ProfileID *uint32
	// Kind limits it to devices of this kind; empty means all.
	Kind Kind
	// Undivided limits it to devices that are no part of a divided GPU: the GPU, its shares
	// and its observer.
	Undivided bool
	// Reason is the name part of the taint's key, after the driver's domain.
	Reason Reason
	// Value is that of the taint: what a program that reads taints may want to know, such
	// as the number of an XID. It is empty for most reasons.
	Value string
	// Effect is the taint's. Empty means NoSchedule.
	Effect policy.Effect
	// Message explains to people what is wrong and what can be done about it. It
	// does not fit into a taint.
	Message string
	// Over says that it is over: devices are held back for a while because of it.
	Over bool
}

// EffectInForce is the effect with the default filled in.
func (c Condition) EffectInForce() policy.Effect { return cmp.Or(c.Effect, policy.EffectNoSchedule) }

// Reason names a condition. It is valid as the name part of a taint's key. Where NVIDIA's
// driver has a taint for the same cause, it has the same name.
type Reason string

const (
	// Occupied says that an instance that this driver did not make is in the
	// place, or uses engines that the device needs.
	Occupied Reason = "occupied"
	// ReleasePending says that the resources of an ended claim could not be removed
	// yet.
	ReleasePending Reason = "release-pending"
	// Opened says that a process without a claim has had the GPU's device node open
	// for so long that it does not keep the GPU back.
	Opened Reason = "opened"
	// Unresponsive says that the GPU does not answer, or that a call on it has
	// not returned.
	Unresponsive Reason = "unresponsive"
	// Lost says that the GPU has fallen off the bus or is not there any more.
	Lost Reason = "gpu-lost"
	// ResetRequired says that the GPU does nothing until it is reset.
	ResetRequired Reason = "reset-required"
	// RecoveryRequired says that the driver wants something to be done about the GPU: a
	// reset, a restart of the machine. The value says what.
	RecoveryRequired Reason = "recovery-required"
	// XID says that the driver has reported an error with a number, which is the value.
	XID Reason = "xid"
	// UncorrectedECC says that memory had an error that ECC could not correct.
	UncorrectedECC Reason = "uncorrected-ecc"
	// RowRemapPending says that rows of memory will be replaced at the next reset.
	RowRemapPending Reason = "row-remap-pending"
	// RowRemapFailed says that a row of memory could not be replaced.
	RowRemapFailed Reason = "row-remap-failed"
	// MemoryUnrepairable says that memory is broken for good.
	MemoryUnrepairable Reason = "memory-unrepairable"
	// FabricUnhealthy says that the connection to the NVLink fabric is not in order.
	FabricUnhealthy Reason = "fabric-unhealthy"
	// Throttled says that the GPU is slow because of heat or lack of power.
	Throttled Reason = "throttled"
	// Unmonitored says that the driver does not report errors of the GPU.
	Unmonitored Reason = "unmonitored"
	// MPSUnhealthy says that clients have lost their MPS server, or that it accepts
	// no new ones.
	MPSUnhealthy Reason = "mps-unhealthy"
	// MPSUnavailable says that nothing on this node can start MPS.
	MPSUnavailable Reason = "mps-unavailable"
	// ForeignClaim says that a claim has a device of another driver with this driver's name
	// that may be the GPU or a part of it. The value names the claim.
	ForeignClaim Reason = "foreign-claim"
	// Cordoned says that an administrator keeps pods away from the GPU.
	Cordoned Reason = "cordoned"
	// Withdrawn says that the policy does not offer the device any more and that a
	// claim may still have it.
	Withdrawn Reason = "withdrawn"
	// AdminAccess says that the device is an observer, which is for claims with admin
	// access. They tolerate it.
	AdminAccess Reason = "admin-access"
	// Gone says that the partition of a static device does not exist any more.
	Gone Reason = "gone"
)

// overTexts are what people are told when a condition is over.
var overTexts = map[Reason]string{
	Lost:               "the GPU is back",
	ResetRequired:      "the GPU works again",
	Unresponsive:       "the GPU answers again",
	RecoveryRequired:   "the driver wants nothing to be done any more",
	XID:                "the error is over",
	UncorrectedECC:     "there were no more errors of memory",
	RowRemapPending:    "its memory was repaired",
	RowRemapFailed:     "rows of its memory can be replaced again",
	MemoryUnrepairable: "its memory is in order",
	FabricUnhealthy:    "its connection to the NVLink fabric is in order",
	Throttled:          "the GPU runs at full speed again",
	Unmonitored:        "the errors of the GPU are reported again",
	MPSUnhealthy:       "MPS accepts processes again",
	MPSUnavailable:     "the MPS supervisor answers again",
	ForeignClaim:       "no claim of another driver has it any more",
	Cordoned:           "no annotation of the node names it any more",
	Opened:             "no process without a claim is known to have its device node open any more",
	Occupied:           "no instance of others is in the way any more",
	ReleasePending:     "what ended claims had left is released",
}

// Over returns the text of the event when the condition is over, by which readers of events recognise the condition.
func (r Reason) Over() string { return cmp.Or(overTexts[r], "no longer "+string(r)) }

// HeldBack begins the message of a condition that is over, by which readers of events recognise it: the GPU is kept out of use for a time.
const HeldBack = "it is over, and the GPU is held back"

// IsFault reports whether something is wrong with the GPU. That somebody has it, or that an administrator keeps it for somebody, is no fault.
func (r Reason) IsFault() bool {
	return !slices.Contains([]Reason{Occupied, ReleasePending, Opened, ForeignClaim, Cordoned, Withdrawn, AdminAccess}, r)
}

// IsFailure reports whether nothing works on the GPU. A reading of a GPU shows one of these at most.
func (r Reason) IsFailure() bool { return r == Lost || r == ResetRequired || r == Unresponsive }

// Sorted returns a copy that shares nothing with s, and whose order does not depend on that of s.
func (s Status) Sorted() Status {
	sorted := Status{
		Static:     slices.SortedFunc(slices.Values(s.Static), compareStatic),
		Conditions: slices.SortedFunc(slices.Values(s.Conditions), compareConditions),
	}
	for n := range sorted.Conditions {
		c := &sorted.Conditions[n]
		if c.Where != nil {
			c.Where = new(*c.Where)
		}
		if c.ProfileID != nil {
			c.ProfileID = new(*c.ProfileID)
		}
	}
	return sorted
}

// compareStatic puts a partition that exists before one that is gone from the same
// place.
func compareStatic(a, b Static) int {
	return cmp.Or(
		cmp.Compare(a.PCIAddress, b.PCIAddress),
		comparePlacements(a.Placement, b.Placement),
		cmp.Compare(a.ProfileID, b.ProfileID),
		cmp.Compare(oneIf(a.Gone), oneIf(b.Gone)),
		cmp.Compare(a.UUID, b.UUID))
}

// compareConditions compares all fields.
func compareConditions(a, b Condition) int {
	return cmp.Or(
		cmp.Compare(a.PCIAddress, b.PCIAddress),
		compareOptional(a.Where, b.Where, comparePlacements),
		compareOptional(a.ProfileID, b.ProfileID, cmp.Compare[uint32]),
		cmp.Compare(oneIf(a.Exact), oneIf(b.Exact)),
		cmp.Compare(a.Kind, b.Kind),
		cmp.Compare(oneIf(a.Undivided), oneIf(b.Undivided)),
		cmp.Compare(a.Reason, b.Reason),
		cmp.Compare(a.Value, b.Value),
		cmp.Compare(a.Effect, b.Effect),
		cmp.Compare(a.Message, b.Message),
		cmp.Compare(oneIf(a.Over), oneIf(b.Over)))
}

func comparePlacements(a, b gpu.Placement) int {
	return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Size, b.Size))
}

// compareOptional puts nil first.
func compareOptional[T any](a, b *T, compare func(a, b T) int) int {
	if a == nil || b == nil {
		return cmp.Compare(oneIf(a != nil), oneIf(b != nil))
	}
	return compare(*a, *b)
}
