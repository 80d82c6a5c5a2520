// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package economics knows what sharing GPUs costs and saves, what each mechanism isolates, and which
// mechanism suits which workload: the commands advise, which gives the manifest, and cost, which goes
// by what claims have now. Formulas and rules are pure.
//
// Formulas, tables and rules have the ids (E1 to E6, D1 to D10) under which the tests name
// them. They are those of published articles; where Partage differs, the tests have both.
package economics

import (
	"slices"
)

// What a workload is.
const (
	Inference = "inference"
	Training  = "training"
	Notebook  = "notebook"
	CI        = "ci"
	MPI       = "mpi"
)

// How late an answer may be.
const (
	// P99 wants 99 of 100 answers within tens of milliseconds.
	P99     = "p99-ms"
	Relaxed = "relaxed"
)

// Who the neighbours on a GPU are.
const (
	SameTeam     = "same-team"
	OtherTenants = "other-tenants"
	Regulated    = "regulated"
)

// When a workload has work.
const (
	Steady = "steady"
	Bursty = "bursty"
	Batch  = "batch"
)

// All of each.
var (
	Kinds     = []string{Inference, Training, Notebook, CI, MPI}
	Latencies = []string{P99, Relaxed}
	Trusts    = []string{SameTeam, OtherTenants, Regulated}
	Traffics  = []string{Steady, Bursty, Batch}
)

// Workload is what somebody wants to run.
type Workload struct {
	Kind, Latency, Trust, Traffic string
	// Memory is what one replica needs, in bytes; 0 is not known.
	Memory int64
	// Count is the number of replicas.
	Count int
}

// untrusted reports whether the neighbours are not trusted.
func (w Workload) untrusted() bool { return w.Trust == OtherTenants || w.Trust == Regulated }

// relaxed reports whether a workload may wait for others.
func (w Workload) relaxed() bool {
	return w.Kind == Notebook || w.Kind == CI || w.Traffic == Bursty || w.Traffic == Batch || w.Latency == Relaxed
}

// Fleet is what there is for a workload.
type Fleet struct {
	// Offered are the mechanisms of which there is a device with enough memory.
	Offered map[Mechanism]bool
	// Fills says that the workload needs more than half of the largest GPU.
	Fills bool
	// MIG says that some GPU can be partitioned.
	MIG bool
	// PreVolta says that all GPUs are of a generation before Volta.
	PreVolta bool
	// Models is how many models of GPU there are.
	Models int
	// Room is how many of the workload's replicas shares of whole GPUs have room for.
	Room int
}

// Rule is a rule of decision.
type Rule struct {
	// ID is D1 to D10.
	ID string `json:"id"`
	// When and Then say it in words.
	When string `json:"when"`
	Then string `json:"then"`
	// Prefer are the mechanisms, the best first. A rule that only adds to another one has none.
	Prefer []Mechanism `json:"-"`
	// applies decides.
	applies func(Workload, Fleet) bool
}

// Rules are all, in the order in which they are tried: the first that applies decides.
// Those without a mechanism are notes, and all that apply are given.
var Rules = []Rule{
	{
		"D5", "training that fills its GPUs, and models that need a whole GPU or more",
		"Whole GPUs: there is nothing left to share, and GPUs that work together need a scheduler that starts all pods of a job or none.",
		[]Mechanism{Whole},
		func(w Workload, f Fleet) bool {
			return w.Kind == Training && (w.Memory == 0 || f.Fills) || w.Memory > 0 && !offersPart(f)
		},
	},
	{
		"D1", "production with several tenants, security domains, regulated data",
		"A MIG partition: memory, multiprocessors and faults are separated in hardware, unless the GPU must be reset. On GPUs without MIG, a whole GPU: no sharing there gives that.",
		[]Mechanism{Partition, Whole},
		func(w Workload, _ Fleet) bool { return w.untrusted() },
	},
	{
		"D4", "online inference with a p99 of tens of milliseconds",
		"Never time slices, in which a request waits for the others' turns. An MPS share where the neighbours are trusted, otherwise a MIG partition.",
		[]Mechanism{MPS, Partition, Whole},
		func(w Workload, _ Fleet) bool { return w.Latency == P99 },
	},
	{
		"D7", "GPUs before Volta",
		"A time-slice share: MPS has 16 clients and no limits there, and Partage does not offer it.",
		[]Mechanism{TimeSlice, Whole},
		func(_ Workload, f Fleet) bool { return f.PreVolta },
	},
	{
		"D8", "more workloads that may be late than shares of whole GPUs have room for, on GPUs with MIG",
		"Shares of MIG partitions: seven partitions with four shares each have room for 28 workloads on one GPU.",
		[]Mechanism{PartitionTimeSlice, PartitionMPS},
		func(w Workload, f Fleet) bool {
			return f.MIG && w.Count > f.Room && w.relaxed() && (f.Offered[PartitionTimeSlice] || f.Offered[PartitionMPS])
		},
	},
	{
		"D2", "one team whose processes each leave most of the GPU idle: small batches, models below 3 billion parameters, MPI ranks",
		"An MPS share, with a limit of memory and of multiprocessors: the processes run at the same time, so that one uses what another leaves idle.",
		[]Mechanism{MPS, Partition, TimeSlice, Whole},
		func(w Workload, _ Fleet) bool {
			return w.Kind == MPI || w.Kind == Inference && w.Traffic == Steady && w.Latency != Relaxed && Small(w.Memory)
		},
	},
	{
		"D6", "GPUs without MIG where limits are wanted and software limits are acceptable",
		"A time-slice share with software limits, by an interposer library. They are cooperative: static binaries escape them.",
		[]Mechanism{SoftwareLimits},
		func(w Workload, f Fleet) bool {
			return !f.MIG && f.Offered[SoftwareLimits] && w.Memory > 0 && w.relaxed()
		},
	},
	{
		"D3", "development, notebooks, CI, bursty or offline work that may be late, on any GPU",
		"A time-slice share: each process has the whole GPU when the others pause, and has to wait when they do not.",
		[]Mechanism{TimeSlice, SoftwareLimits, MPS, Partition, Whole},
		func(w Workload, _ Fleet) bool { return w.relaxed() },
	},
	{
		"D1", "production with guaranteed memory and compute",
		"A MIG partition: its memory, bandwidth and multiprocessors are its own. On GPUs without MIG, an MPS share among processes that trust each other has limits, and no guarantee.",
		[]Mechanism{Partition, MPS, Whole},
		func(Workload, Fleet) bool { return true },
	},
	{
		"D9", "a fleet of several models of GPU",
		"Give each model a rule of its own in the sharing policy: what suits an H100 does not suit a T4. See templates/policy-per-model.values.yaml.",
		nil,
		func(_ Workload, f Fleet) bool { return f.Models > 1 },
	},
	{
		"D10", "several models or replicas of one",
		"Fill one node first, then add nodes. Routing that knows which replica has what in its cache belongs above the driver.",
		nil,
		func(w Workload, _ Fleet) bool { return w.Kind == Inference && w.Count > 1 },
	},
}

// offersPart reports whether a part of a GPU is enough.
func offersPart(f Fleet) bool {
	return slices.ContainsFunc(Mechanisms, func(m Mechanism) bool { return m != Whole && f.Offered[m] })
}

// Decision is what the rules say.
type Decision struct {
	Rule Rule
	// Mechanism is "" if the fleet offers nothing that the rule which applies could take.
	Mechanism Mechanism
	// Missing are mechanisms that the rule prefers and the fleet does not offer.
	Missing []Mechanism
	// Notes are rules that add something.
	Notes []Rule
}

// Decide returns what the rules say of a workload.
func Decide(w Workload, f Fleet) (d Decision) {
	for _, r := range Rules {
		switch {
		case r.Prefer == nil:
			if r.applies(w, f) {
				d.Notes = append(d.Notes, r)
			}
		case d.Rule.ID == "" && r.applies(w, f):
			d.Rule = r
		}
	}
	for _, m := range d.Rule.Prefer {
		if f.Offered[m] {
			d.Mechanism = m
			break
		}
		d.Missing = append(d.Missing, m)
	}
	return d
}
