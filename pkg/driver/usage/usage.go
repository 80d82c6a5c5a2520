// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package usage finds out how much of the GPUs each prepared claim uses.
//
//	sampler.go    asks the GPUs again and again, and remembers
//	holding.go    what claims have, as metrics name it. Pure
//	attribute.go  divides what a GPU reports among the claims on it. Pure
//	facts.go      what only the API server knows of a claim
//
// A snapshot never asks anybody: a GPU that does not answer keeps nobody waiting.
package usage

import (
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
)

// Snapshot is what was known at one moment. What is not known is nil.
type Snapshot struct {
	// GPUs are by PCI address.
	GPUs map[string]GPU
	// Claims has an entry for each device of each prepared claim.
	Claims []Claim
	// Records counts the records of the journal by their states, each of which it has.
	Records map[string]int
	// Sessions counts MPS sessions by their phase. It is nil where no supervisor answers.
	Sessions map[mps.Phase]int
}

// GPU is what was last read of a GPU. Usage is nil when that is too old.
type GPU struct {
	// Sampled is when it was read; zero: never.
	Sampled time.Time
	Usage   *gpu.Usage
	// UnattributedBytes are used by nobody's claim, as far as can be told.
	UnattributedBytes uint64
}

// Claim is what a claim uses of one of its devices.
type Claim struct {
	Holding
	Measured

	// Pods are the names of those that the claim is reserved for, in order.
	Pods []string
	// PeakBytes is the most that any sample had.
	PeakBytes *uint64
	// RequestedBytes is what the scheduler reserved for the claim.
	RequestedBytes *int64
	// Idle is for how long no sample had the claim at work.
	Idle *time.Duration
}

// Measured is what was read of a claim's device.
type Measured struct {
	// MemoryBytes is what its processes have, and their contexts.
	MemoryBytes *uint64
	// Utilization is the part of the time, 0 to 1, in which its kernels ran.
	Utilization *float64
	Processes   *int
}

// active reports whether the claim uses its device, and whether that is known.
func (m Measured) active() (active, known bool) {
	switch {
	case m.Utilization != nil:
		return *m.Utilization > 0, true
	case m.Processes != nil:
		return *m.Processes > 0, true
	}
	return false, false
}
