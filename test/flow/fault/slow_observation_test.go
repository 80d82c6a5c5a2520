// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// keepsBack are the observations of a GPU that delay for seconds, while they are held, what changes on all others. Then it is published:
// TestChangePublishedWhileAnotherGPUIsSlow.
var keepsBack = []string{
	"nvmlComputeInstanceGetInfo_v2",
	"nvmlDeviceGetGpuInstances",
	"nvmlDeviceGetMemoryInfo",
	"nvmlDeviceGetMigMode",
	"nvmlDeviceGetUUID",
	"nvmlGpuInstanceGetComputeInstances",
	"nvmlGpuInstanceGetInfo",
}

// TestSlowObservations holds the calls with which the driver looks at a GPU every now and then, function by function. A claim on
// another GPU comes and goes meanwhile, and what changes there is published.
func TestSlowObservations(t *testing.T) {
	t.Parallel()
	l := newSlowObservation(t)
	count := harness.Enumerate(t, "slow observations", 18)
	observations := l.observations(t)
	for _, function := range harness.Choose(count, observations) {
		known := slices.Contains(keepsBack, function)
		expect.Do(t, l.runSlowObservation(t.Context(), function, known), "all calls of", function, "are held")
		count.Ran(function)
	}
	for _, function := range keepsBack {
		if !slices.Contains(observations, function) {
			t.Errorf("%s is no observation any more: take it off the list", function)
		}
	}
}

// TestChangePublishedWhileAnotherGPUIsSlow: what the scheduler has to know of a GPU does not wait for another one.
func TestChangePublishedWhileAnotherGPUIsSlow(t *testing.T) {
	t.Parallel()
	l := newSlowObservation(t)
	gate := l.n.Hold(t, "nvmlDeviceGetGpuInstances", 0)
	defer gate.Remove(t)
	gate.UntilHeld(t, 1)
	expect.Do(t, l.changesArePublished(t.Context(), enoughTime/8), "GPU 0 is slow, and what changes on GPU 1 is not published")
}

// newSlowObservation is a driver that looks at two GPUs all the time, of which one has a partition.
func newSlowObservation(t *testing.T) *worker {
	t.Helper()
	r := &faultRig{n: harness.NewNode(t, "h100x2"), layout: faultLayout{at: harness.Place{Profile: "1g.10gb", Start: 4}}}
	r.n.StartSupervisor(t) // shares by MPS are tainted without
	r.p = r.n.Start(t, slices.Concat(harness.Frequent, patient)...)
	r.p.UntilPublished(t, r.n, 0, 1)
	r.p.NewClaim(t, r.n, harness.Partition(0, "1g.10gb", 0))
	return &worker{faultRig: r, gpu: 0, neighbour: 1}
}

// runSlowObservation returns what is wrong while calls are held. Where it is known that publishing is delayed, that is an error if
// it is not so any more; it is looked at where all cases are.
func (l *worker) runSlowObservation(ctx context.Context, function string, known bool) error {
	fault, err := l.n.TryInject(machine.Fault{Function: function, GPU: l.gpu, Hang: true, Effect: machine.Proceed})
	if err != nil {
		return err
	}
	err = harness.Eventually(ctx, fault.CheckStruck)
	if err == nil {
		err = l.neighbourGoes(ctx)
	}
	switch {
	case err != nil || known && !harness.TheSample().All():
	case !known:
		if err = l.changesArePublished(ctx, enoughTime); err != nil {
			err = fmt.Errorf("what changes on GPU %d is not published: %w", l.neighbour, err)
		}
	case l.changesArePublished(ctx, enoughTime/20) == nil:
		err = fmt.Errorf("what changes on GPU %d is published: take the call off the list", l.neighbour)
	}
	_, removeErr := fault.TryRemove()
	return errors.Join(err, removeErr, l.occupyNeighbour(false), l.untilTainted(ctx, false))
}

// changesArePublished fails if what changes on the other GPU is not published in time. It changes several times:
// an observation that had begun before is over then.
func (l *worker) changesArePublished(ctx context.Context, limit time.Duration) error {
	for _, occupied := range []bool{true, false, true} {
		if err := l.occupyNeighbour(occupied); err != nil {
			return err
		}
		limited, cancel := context.WithTimeout(ctx, limit)
		err := l.untilTainted(limited, occupied)
		cancel()
		if err != nil {
			return fmt.Errorf("somebody's partition there: %v, %w", occupied, err)
		}
	}
	return nil
}

// untilTainted waits until the whole of the other GPU is published with a taint, or without.
func (l *worker) untilTainted(ctx context.Context, want bool) error {
	m, err := l.n.State.Snapshot()
	if err != nil {
		return err
	}
	whole := harness.DeviceName(m.GPUs[l.neighbour].PCIAddress, harness.Place{})
	return harness.Eventually(ctx, func() error {
		if _, tainted := l.n.Offered(whole); len(tainted) > 0 != want {
			return fmt.Errorf("tainted are %v", tainted)
		}
		return nil
	})
}
