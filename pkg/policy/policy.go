// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package policy holds the admin's rules for what each GPU is offered as: which kinds
// of devices, which MIG profiles, how many claims share one, and how; and for what
// follows when something is wrong with one. The rules are one strict, versioned file, a
// SharingPolicy.
//
// The package is pure: the caller reads the file and watches it for changes.
package policy

import (
	"slices"
	"strings"
)

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
	// TimeSlice is a GPU that claims share by time-slicing.
	TimeSlice Kind = "timeslice"
)

// Interval is how long one process runs on a time-sliced GPU before the next.
type Interval string

// Values of Interval are those of nvidia-smi compute-policy. Their lengths are defined
// by the driver and not documented.
const (
	// IntervalDefault leaves the GPU's setting alone.
	IntervalDefault Interval = "Default"
	IntervalShort   Interval = "Short"
	IntervalMedium  Interval = "Medium"
	IntervalLong    Interval = "Long"
)

// Policy is a SharingPolicy with all defaults filled in. It must not be changed.
type Policy struct {
	// Rules are in order: the first that matches a GPU applies.
	Rules []Rule
	// Default is for GPUs that no rule matches.
	Default Offer
	// Health is how nodes react to what is wrong with GPUs.
	Health Health
}

// Rule is an offer for some GPUs.
type Rule struct {
	// Name is unique, for people.
	Name  string
	Match Match
	Offer Offer
}

// Match selects the GPUs of a rule: those that match all fields that are set. At least
// one is set. Letter case is ignored.
type Match struct {
	// ProductName is a glob for the product name, in the syntax of path.Match.
	ProductName string
	// Architecture is one of the names that package gpu/nvml uses: "Ampere",
	// "Ada Lovelace", "Hopper", ….
	Architecture string
	// PCIDeviceID is vendor and device as lspci -nn prints them, "10de:2330".
	PCIDeviceID string
	// UUID is the GPU's, "GPU-…".
	UUID string
}

// Offer is what a GPU is published as. A nil pointer means that this kind is not
// offered. The zero value leaves the GPU alone: nothing is published.
type Offer struct {
	Whole     bool
	Partition *PartitionOffer
	MPS       *MPSOffer
	TimeSlice *TimeSliceOffer
}

// PartitionOffer is which MIG partitions are offered.
type PartitionOffer struct {
	// Profiles are the names of the offered profiles, "1g.10gb". Nil means all that
	// the GPU has, without variants; an empty list that is not nil means none, so that
	// partitions are offered as shares only.
	Profiles []string
	// Variants offers the variants of profiles as well ("1g.10gb+me", "1g.24gb-me").
	// It is for Profiles that are nil.
	Variants bool
	// Shares are the shares of partitions. Each profile occurs at most once. It need
	// not be among Profiles: such partitions are offered as shares only.
	Shares []PartitionShares
}

// Offers reports whether partitions of a profile are offered to one claim each.
func (p *PartitionOffer) Offers(profile string) bool {
	switch {
	case p == nil:
		return false
	case p.Profiles != nil:
		return slices.Contains(p.Profiles, profile)
	}
	return p.Variants || !IsVariant(profile)
}

// OffersExisting reports the same for a partition that somebody else has made. It is
// one device only, so that variants need not be asked for.
func (p *PartitionOffer) OffersExisting(profile string) bool {
	return p != nil && (p.Profiles == nil || slices.Contains(p.Profiles, profile))
}

// IsVariant reports whether a profile is one with other engines than the profile
// that has the same size: "1g.10gb+me", "1g.24gb+gfx", "1g.24gb-me".
func IsVariant(profile string) bool { return strings.ContainsAny(profile, "+-") }

// PartitionShares is how partitions of some profiles are shared.
type PartitionShares struct {
	Profiles []string
	MPS      *MPSOffer
	// TimeSlice has the interval IntervalDefault, the only one for MIG partitions.
	TimeSlice *TimeSliceOffer
}

// MPSOffer is how claims share a device through MPS.
type MPSOffer struct {
	// Clients is how many claims may share one device, at least 1. The hardware may
	// allow fewer, see gpu.GPU.MPSClients.
	Clients int
	// MemoryOvercommit, at least 1, is the memory that all claims together may ask
	// for, as a multiple of the device's. One claim never gets more than the device
	// has.
	MemoryOvercommit float64
	// ReservedMemoryBytes is memory of the device that is not offered, beside what the
	// driver, the MPS server and the clients' contexts need.
	ReservedMemoryBytes int64
	// ServerMemoryBytes is what the MPS server needs, ContextMemoryBytes what the
	// processes of each claim do beside what they allocate. Nil means an estimate that
	// depends on the device, see gpu.MPSServerMemory and gpu.GPU.ContextMemory.
	ServerMemoryBytes, ContextMemoryBytes *int64
	// ComputeOvercommit, at least 1, is the same for the multiprocessors. With 2 each claim
	// is limited to twice an equal part, which NVIDIA recommends for clients that pause.
	ComputeOvercommit float64
	// OnClientKilled is what becomes of the server, and so of all other clients, when a
	// client was killed that may have been busy. Empty is KilledReport.
	OnClientKilled OnClientKilled
	// ClientPriority is that of clients whose claims do not ask for one. Empty is
	// PriorityNormal.
	ClientPriority ClientPriority
}

// ClientPriority is a client's priority among the clients of an MPS server: a hint to the
// driver, as NVIDIA says, and no guarantee.
type ClientPriority string

const (
	// PriorityNormal is what every client has by itself, 0 in NVIDIA's documentation.
	PriorityNormal ClientPriority = "Normal"
	// PriorityBelowNormal is 1 there. Work of clients with PriorityNormal comes first,
	// whatever the priorities of their streams.
	PriorityBelowNormal ClientPriority = "BelowNormal"
)

// OnClientKilled is a reaction to a killed client, after which NVIDIA calls the state of the
// MPS server undefined.
type OnClientKilled string

const (
	// KilledReport tells the claims that share the server, which is replaced as soon as it
	// has no clients.
	KilledReport OnClientKilled = "Report"
	// KilledRestart replaces the server at once, which ends all its clients.
	KilledRestart OnClientKilled = "Restart"
)

// TimeSliceOffer is how claims share a device by time-slicing.
type TimeSliceOffer struct {
	Clients  int
	Interval Interval
	// MemoryOvercommit is as for MPS. Without an interposer library only the scheduler
	// counts memory.
	MemoryOvercommit float64
}

// Effective is the offer for one GPU, and why.
type Effective struct {
	Offer
	// Rule is the name of the rule that applies, empty for the default.
	Rule string
}

// DefaultClients is how many claims share a device where an offer does not say.
const DefaultClients = 4

// Builtin returns the policy of a driver without a policy file: every kind of device
// on every GPU, shares of whole GPUs for DefaultClients claims, no shares of
// partitions, and no variants of profiles: they would be a quarter to a half of all
// devices, and few claims need their engines.
func Builtin() *Policy {
	return &Policy{
		Default: Offer{
			Whole:     true,
			Partition: &PartitionOffer{},
			MPS:       &MPSOffer{Clients: DefaultClients, MemoryOvercommit: 1, ComputeOvercommit: 1},
			TimeSlice: &TimeSliceOffer{Clients: DefaultClients, Interval: IntervalDefault, MemoryOvercommit: 1},
		},
		Health: builtinHealth(),
	}
}
