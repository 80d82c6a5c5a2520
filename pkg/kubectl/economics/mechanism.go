// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import "github.com/partage-dev/partage/pkg/kubectl/fleet"

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

// Range is from Low to High, both included.
type Range struct {
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// Traits are what Partage says of a mechanism.
type Traits struct {
	// device is the type of its devices, and partitions says that these are shares of partitions.
	device     string
	partitions bool
	// Isolation is, for shares of partitions, that from the other claims on the partition; the rest of the GPU is isolated in hardware. That of
	// memory is the value of the devices' attribute "isolation".
	Isolation
	// Note says where Partage differs from published tables, or what the words mean.
	Note string
	// Overhead is by how much it slows the work, as a part of it (E6). It depends on the workload: these are published
	// averages. A software limit costs something with each call, for which no figure is published; it runs on time slices.
	Overhead Range
	// works is what is said of it in general. untrusted, if there is one, is said instead where the neighbours do not trust each
	// other, and late where an answer must come within tens of milliseconds.
	works, untrusted, late string
}

// What is said of time slices, of GPUs and of partitions.
const (
	slicesWork      = "works for what may wait; there are no limits, and an out-of-memory error of one can be that of all"
	slicesUntrusted = "not for tenants that do not trust each other: it isolates nothing"
	slicesLate      = "never for a p99 of tens of milliseconds: each process waits while the others have their turn"
)

// Guarantees is the matrix as Partage has it.
var Guarantees = map[Mechanism]Traits{
	Whole: {
		device:    fleet.TypeGPU,
		Isolation: Isolation{"hardware", "hardware", "hardware", "negligible"},
		works:     "works, and nobody else can use what it leaves idle",
	},
	Partition: {
		device:    fleet.TypeMIG,
		Isolation: Isolation{"hardware", "hardware", "hardware", "negligible"},
		works:     "works; its size is fixed while it runs, and what it leaves idle nobody else can use",
	},
	MPS: {
		device:    fleet.TypeMPS,
		Isolation: Isolation{"process", "software", "none", "low"}, Overhead: Range{0.05, 0.05},
		Note:      "memory: an address space of its own, and a limit for each process; faults: one MPS server, so that a fatal fault of one client ends all clients of the GPU",
		works:     "works among processes that trust each other; a fatal fault of one client ends all",
		untrusted: "not for tenants that do not trust each other: a fatal fault of one client ends all",
	},
	PartitionMPS: {
		device: fleet.TypeMPS, partitions: true,
		Isolation: Isolation{"software", "software", "none", "low"}, Overhead: Range{0.05, 0.05},
		Note:      "against other claims on the partition, where a program can go around MPS; the rest of the GPU is isolated in hardware",
		works:     "more of them fit on a GPU; a fatal fault of one client ends all on the partition",
		untrusted: "not for tenants that do not trust each other: a fatal fault of one client ends all",
	},
	TimeSlice: {
		device:    fleet.TypeTimeSlice,
		Isolation: Isolation{"none", "none", "none", "high"}, Overhead: Range{0.10, 0.15},
		Note:  "faults: published tables say partial; Partage promises nothing, because one that resets the GPU ends all",
		works: slicesWork, untrusted: slicesUntrusted, late: slicesLate,
	},
	PartitionTimeSlice: {
		device: fleet.TypeTimeSlice, partitions: true,
		Isolation: Isolation{"none", "none", "none", "high"}, Overhead: Range{0.10, 0.15},
		Note:  "against other claims on the partition; the rest of the GPU is isolated in hardware",
		works: slicesWork, untrusted: slicesUntrusted, late: slicesLate,
	},
	SoftwareLimits: {
		device:    fleet.TypeTimeSlice,
		Isolation: Isolation{"software", "software", "none", "low to medium"}, Overhead: Range{0.10, 0.15},
		Note:      "the limits are cooperative: a statically linked program escapes them; faults: as with time-slicing",
		works:     "limits that hold for programs that are not hostile; each still waits for the others' turns",
		untrusted: "not for hostile programs: a statically linked one escapes the limits",
	},
}

// WhyNot says why a workload should not have a mechanism that would be there.
func WhyNot(m Mechanism, w Workload) string {
	switch t := Guarantees[m]; {
	case w.untrusted() && t.untrusted != "":
		return t.untrusted
	case w.Latency == P99 && t.late != "":
		return t.late
	default:
		return t.works
	}
}
