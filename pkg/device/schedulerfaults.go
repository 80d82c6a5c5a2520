// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"

	"k8s.io/apimachinery/pkg/util/version"
)

// SchedulerFaults are what the scheduler of a Kubernetes version does wrong with the
// devices of an inventory. test/allocators finds them by running the schedulers' code.
type SchedulerFaults struct {
	// IgnoresCounters: it does not look for counters in slices of their own. Whole GPUs
	// and their partitions would be allocated at the same time.
	IgnoresCounters bool
	// ForgetsShares: a share that a claim has does not count against the counters, so that
	// the whole GPU, its partitions and shares of another kind are allocated beside it
	// (kubernetes/kubernetes#139034).
	ForgetsShares bool
	// CrashesOnAll: it ends with a nil pointer, again and again, when a claim asks for all
	// devices (allocationMode) and one of them draws on counters
	// (kubernetes/kubernetes#138882).
	CrashesOnAll bool
}

// FaultsOfScheduler returns the faults of a Kubernetes version, such as "v1.36.1". The
// suffix that a distribution adds to it does not matter.
func FaultsOfScheduler(kubernetes string) (SchedulerFaults, error) {
	v, err := version.ParseGeneric(kubernetes)
	if err != nil {
		return SchedulerFaults{}, fmt.Errorf("the Kubernetes version %q: %w", kubernetes, err)
	}
	before := func(fixed string) bool { return v.LessThan(version.MustParseGeneric(fixed)) }
	if before("1.35.0") {
		return SchedulerFaults{IgnoresCounters: true}, nil
	}
	return SchedulerFaults{
		ForgetsShares: before("1.36.2"),
		CrashesOnAll:  before("1.35.6") || !before("1.36.0") && before("1.36.2"),
	}, nil
}

// Limit returns the options without what a scheduler with these faults would allocate
// twice.
func (f SchedulerFaults) Limit(o Options) Options {
	o.PartitionableDevices = o.PartitionableDevices && !f.IgnoresCounters
	o.ConsumableCapacity = o.ConsumableCapacity && !f.IgnoresCounters
	o.NoShareCounters = o.NoShareCounters || f.ForgetsShares
	return o
}
