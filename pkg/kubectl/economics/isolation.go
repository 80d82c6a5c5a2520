// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

// Mechanism is a way to give a workload a GPU or a part of one.
type Mechanism string

// The mechanisms.
const (
	Whole              Mechanism = "whole GPU"
	Partition          Mechanism = "MIG partition"
	MPS                Mechanism = "MPS share"
	TimeSlice          Mechanism = "time-slice share"
	SoftwareLimits     Mechanism = "time-slice share with software limits"
	PartitionMPS       Mechanism = "MPS share of a MIG partition"
	PartitionTimeSlice Mechanism = "time-slice share of a MIG partition"
)

// Mechanisms are all, the strongest isolation first.
var Mechanisms = []Mechanism{Whole, Partition, PartitionMPS, MPS, SoftwareLimits, PartitionTimeSlice, TimeSlice}

// Isolation says how a workload is isolated from its neighbours on the GPU, on four axes.
type Isolation struct {
	Memory  string `json:"memory"`
	Compute string `json:"compute"`
	Fault   string `json:"fault"`
	Jitter  string `json:"jitter"`
}

// Guarantee is what Partage says of a mechanism.
type Guarantee struct {
	Isolation
	// Attribute is the value of the devices' attribute "isolation".
	Attribute string
	// Note says where Partage differs from published tables, or what the words mean.
	Note string
}

// Guarantees is the matrix as Partage has it. For shares of partitions it is about the other
// claims on the partition; the rest of the GPU is isolated in hardware.
var Guarantees = map[Mechanism]Guarantee{
	Whole:     {Isolation{"hardware", "hardware", "hardware", "negligible"}, "hardware", ""},
	Partition: {Isolation{"hardware", "hardware", "hardware", "negligible"}, "hardware", ""},
	MPS: {
		Isolation{"process", "software", "none", "low"}, "process",
		"memory: an address space of its own, and a limit for each process; faults: one MPS server, so that a fatal fault of one client ends all clients of the GPU",
	},
	PartitionMPS: {
		Isolation{"software", "software", "none", "low"}, "software",
		"against other claims on the partition, where a program can go around MPS; the rest of the GPU is isolated in hardware",
	},
	TimeSlice: {
		Isolation{"none", "none", "none", "high"}, "none",
		"faults: published tables say partial; Partage promises nothing, because one that resets the GPU ends all",
	},
	PartitionTimeSlice: {
		Isolation{"none", "none", "none", "high"}, "none",
		"against other claims on the partition; the rest of the GPU is isolated in hardware",
	},
	SoftwareLimits: {
		Isolation{"software", "software", "none", "low to medium"}, "software",
		"the limits are cooperative: a statically linked program escapes them; faults: as with time-slicing",
	},
}
