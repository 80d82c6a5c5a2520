// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package policy holds the admin's rules about what each GPU is offered as:
// which kinds of devices, which MIG profiles, how many share one, and how. The
// rules are one strict, versioned file, a SharingPolicy.
//
// It is pure: reading the file and noticing that it has changed is for the
// caller.
package policy

const (
	// Version is the apiVersion of a SharingPolicy.
	Version = "policy.partage.dev/v1alpha1"
	// PolicyKind is its kind.
	PolicyKind = "SharingPolicy"
)

// Kind is a kind of device, as in the attribute "type" of a published device.
type Kind string

const (
	// Whole is an undivided GPU for one claim.
	Whole Kind = "gpu"
	// Partition is a MIG partition for one claim.
	Partition Kind = "mig"
	// MPS is a GPU that claims share through MPS.
	MPS Kind = "mps"
	// TimeSlice is a GPU that claims share by turns.
	TimeSlice Kind = "timeslice"
)

// Interval is how long a process keeps a time-sliced GPU before it is the next
// one's turn.
type Interval string

// Values of Interval, those of nvidia-smi compute-policy. The driver defines
// their length, which is not documented.
const (
	// IntervalDefault leaves what the GPU is set to alone.
	IntervalDefault Interval = "Default"
	IntervalShort   Interval = "Short"
	IntervalMedium  Interval = "Medium"
	IntervalLong    Interval = "Long"
)

// Policy is a SharingPolicy with all defaults filled in. It must not be changed.
type Policy struct {
	// Rules are tried in order, the first that matches a GPU counts.
	Rules []Rule
	// Default is for GPUs that no rule matches.
	Default Offer
}

// Rule is an offer for some GPUs.
type Rule struct {
	// Name is unique, for people.
	Name  string
	Match Match
	Offer Offer
}

// Match says which GPUs a rule is for: those that all fields that are set match.
// At least one is set. Letter case does not count.
type Match struct {
	// ProductName is a glob (path.Match) on the product name.
	ProductName string
	// Architecture is one of the names that package gpu/nvml gives: "Ampere",
	// "Ada Lovelace", "Hopper", ….
	Architecture string
	// PCIDeviceID is vendor and device as lspci -nn prints them, "10de:2330".
	PCIDeviceID string
	// UUID is the GPU's, "GPU-…".
	UUID string
}

// Offer is what a GPU is published as. A pointer that is nil means that this kind
// is not offered.
type Offer struct {
	Whole     bool
	Partition *PartitionOffer
	MPS       *MPSOffer
	TimeSlice *TimeSliceOffer
}

// PartitionOffer is which MIG partitions are offered.
type PartitionOffer struct {
	// Profiles are the names of the profiles that are offered, "1g.10gb"; nil
	// stands for all that the GPU has. An empty list that is not nil stands for
	// none: partitions are then offered as shares only.
	Profiles []string
	// Shares of partitions. A profile is in one of them at most. Their profiles
	// need not be among Profiles: such partitions are offered as shares only.
	Shares []PartitionShares
}

// PartitionShares is how partitions of some profiles are shared.
type PartitionShares struct {
	Profiles []string
	MPS      *MPSOffer
	// TimeSlice has the interval IntervalDefault: MIG partitions have no other.
	TimeSlice *TimeSliceOffer
}

// MPSOffer is how claims share a device through MPS.
type MPSOffer struct {
	// Clients is how many claims share one device, at least 1. The hardware
	// may allow fewer, see gpu.GPU.MPSClients.
	Clients int
	// MemoryOvercommit times the device's memory is what claims may ask for
	// together, at least 1. One claim never gets more than the device has.
	MemoryOvercommit float64
	// ReservedMemoryBytes of the device are not offered: the driver and each
	// CUDA context need some themselves.
	ReservedMemoryBytes int64
	// ComputeOvercommit times 100 % of the multiprocessors is what claims may
	// ask for together, at least 1.
	ComputeOvercommit float64
}

// TimeSliceOffer is how claims share a device by turns.
type TimeSliceOffer struct {
	Clients  int
	Interval Interval
	// MemoryOvercommit is as for MPS. Where no interposer library enforces it,
	// memory only counts for the scheduler.
	MemoryOvercommit float64
}

// Effective is the offer for one GPU, and why.
type Effective struct {
	Offer
	// Rule is the name of the rule that matched, empty for the default.
	Rule string
}

// Built-in values of what an offer leaves out.
const (
	DefaultClients = 4
	// DefaultReservedMemoryBytes is about what the driver and an MPS server take
	// of a GPU.
	DefaultReservedMemoryBytes = 512 << 20
)

// Builtin is the policy of a driver without a policy file: every kind of device
// on every GPU, shares of whole GPUs for DefaultClients claims, no shares of
// partitions.
func Builtin() *Policy {
	return &Policy{Default: Offer{
		Whole:     true,
		Partition: &PartitionOffer{},
		MPS: &MPSOffer{
			Clients: DefaultClients, MemoryOvercommit: 1, ComputeOvercommit: 1, ReservedMemoryBytes: DefaultReservedMemoryBytes,
		},
		TimeSlice: &TimeSliceOffer{Clients: DefaultClients, Interval: IntervalDefault, MemoryOvercommit: 1},
	}}
}
