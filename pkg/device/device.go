// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// Kind is the kind of a device, and the value of its attribute "type".
type Kind string

const (
	// Whole is an undivided GPU.
	Whole Kind = "gpu"
	// Partition is a MIG GPU instance with the one compute instance that
	// spans it.
	Partition Kind = "mig"
	// MPS is a GPU, or a partition, that several claims share through MPS.
	MPS Kind = "mps"
	// TimeSlice is a GPU, or a partition, that several claims use in turns.
	TimeSlice Kind = "timeslice"
	// Observer is a GPU for claims with admin access, which look at what others do
	// with it. It draws on no counters: the scheduler does not grant admin access to a
	// device whose counters are in use (kubernetes/kubernetes#140729).
	Observer Kind = "observer"
)

// IsShare reports whether several claims can have such a device.
func (k Kind) IsShare() bool { return k == MPS || k == TimeSlice }

// Device is one entry of a ResourceSlice.
type Device struct {
	// Name is unique on the node, a DNS label.
	Name string
	Kind Kind
	// GPU is the physical GPU. It belongs to the node that the inventory was
	// made of and must not be changed.
	GPU *gpu.GPU
	// Partition is nil for a whole GPU, for shares of one and for an observer.
	Partition *PartitionShape
	// Share is not nil for the kinds MPS and TimeSlice. It must not be changed.
	Share *Share
	// Static is not nil for a partition that another tool created. It must not
	// be changed.
	Static *Static
}

// Exclusive reports whether one claim has the device alone.
func (d Device) Exclusive() bool { return d.Share == nil }

// Share says how a device is shared.
type Share struct {
	// Base is the name of the device that is shared: the name it has where one
	// claim has it alone.
	Base string
	// Clients is how many claims can have a share.
	Clients int
	// MemoryBytes is what claims can request together. One claim gets at most
	// MaxMemoryBytes, and DefaultMemoryBytes if it requests no amount; 0 means that
	// nothing is reserved for it and nothing limits it.
	MemoryBytes, MaxMemoryBytes, DefaultMemoryBytes int64
	// Percent is the part of the multiprocessors that claims can request together,
	// DefaultPercent that of a claim which requests no amount; 0 means no limit.
	// Percent may be above 100, one claim gets at most 100.
	Percent, DefaultPercent int
	// Interval is for TimeSlice on a whole GPU, otherwise IntervalDefault.
	Interval policy.Interval
	// Limited says that an interposer library in the containers enforces the memory
	// and percentage of a TimeSlice share.
	Limited bool
	// Held says that the driver holds each container with a share to its memory.
	Held bool
	// OnClientKilled and ClientPriority are for MPS.
	OnClientKilled policy.OnClientKilled
	ClientPriority policy.ClientPriority
}

// PartitionShape identifies a partition of a GPU.
type PartitionShape struct {
	Profile   gpu.Profile
	Placement gpu.Placement
}
