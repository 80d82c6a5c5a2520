// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestFaultsWhileInUse makes the calls go wrong that find out which process holds a
// partition that cannot be removed. The error must still say that it is in use, and the
// partition goes when the process has ended.
func TestFaultsWhileInUse(t *testing.T) {
	t.Parallel()
	r := newFaultRig(t, faultLayouts["partition"], workers)
	header := readHeader(t)
	var cases []faultCase
	functions := r.whoHoldsIt(t)
	for _, function := range slices.Sorted(maps.Keys(functions)) {
		codes := must.Get(header.codes(function))(t)
		cases = append(cases, ways(harness.Unprepare, function, functions[function], codes)...)
	}
	r.runAll(t, harness.Enumerate(t, "faults", 45), "in use", cases, (*worker).runInUse)
}

// whoHoldsIt are the functions that are called only where a partition is in use.
func (r *faultRig) whoHoldsIt(t *testing.T) map[string]int {
	t.Helper()
	usual := r.count(t, harness.Unprepare)
	l := &worker{faultRig: r, gpu: 0, neighbour: 1}
	claim, end, err := l.beginInUse(t.Context())
	must.Do(t, err)
	counts := r.countCalls(t, func() {
		// The pod ends, and the log says who keeps the partition.
		must.Do(t, r.p.TryUnprepare(t.Context(), claim, harness.KubeletTimeout))
		r.p.WantLog(t, fmt.Sprintf("process %d", trainer))
		must.Do(t, l.checkPending(claim.GetUid()))
	})
	must.Do(t, errors.Join(end(), l.cleanUp(t.Context(), claim)))
	maps.DeleteFunc(counts, func(function string, _ int) bool { return usual[function] > 0 })
	if len(counts) == 0 {
		t.Fatal("nothing is called to find out who holds a partition")
	}
	return counts
}

// trainer is the process that holds the partition of each worker.
const trainer = 4711

// beginInUse prepares a claim, and a process uses it until end is called.
func (l *worker) beginInUse(ctx context.Context) (claim *drapb.Claim, end func() error, err error) {
	if claim, err = l.begin(ctx, harness.Unprepare); err != nil {
		return nil, nil, err
	}
	pid := trainer + l.gpu
	err = l.n.State.Update(func(m *machine.Machine) error {
		in := l.layout.at.Find(&m.GPUs[l.gpu])
		if in == nil {
			return fmt.Errorf("GPU %d has no partition %v", l.gpu, l.layout.at)
		}
		m.Processes = append(m.Processes, machine.Process{
			PID: pid, Name: "train", GPU: l.gpu, InstanceID: in.ID, ComputeID: in.Compute[0].ID,
		})
		return nil
	})
	end = func() error {
		return l.n.State.Update(func(m *machine.Machine) error {
			m.Processes = slices.DeleteFunc(m.Processes, func(p machine.Process) bool { return p.PID == pid })
			return nil
		})
	}
	return claim, end, err
}

// runInUse is run for a claim that a process uses.
func (l *worker) runInUse(ctx context.Context, c faultCase) error {
	claim, end, err := l.beginInUse(ctx)
	if err != nil {
		return fmt.Errorf("before the fault: %w", err)
	}
	c.fault.GPU = l.gpu
	fault, err := l.n.TryInject(c.fault)
	if err != nil {
		return err
	}
	neighbour := make(chan error, 1)
	go func() { neighbour <- l.roundTrip(ctx, l.neighbour) }()
	callErr := l.p.TryUnprepare(ctx, claim, harness.ShortTimeout)
	// How often the driver tries depends on how long its attempts take.
	notStruck := harness.Eventually(ctx, func() error {
		err := fault.CheckStruck()
		if err != nil {
			callErr = l.p.TryUnprepare(ctx, claim, harness.ShortTimeout)
		}
		return err
	})
	for harness.IsTimeout(callErr) && ctx.Err() == nil {
		callErr = l.p.TryUnprepare(ctx, claim, harness.KubeletTimeout)
	}
	errs := []error{<-neighbour, notStruck}
	_, err = fault.TryRemove()
	errs = append(errs, err, l.checkInUse(c, claim, callErr), end(), l.cleanUp(ctx, claim))
	return errors.Join(errs...)
}

// checkInUse fails unless the call has succeeded and the driver retries by itself, or the
// error names the process that holds the partition, or the call that failed to find it.
func (l *worker) checkInUse(c faultCase, claim *drapb.Claim, err error) error {
	m, readErr := l.n.State.Snapshot()
	if readErr != nil {
		return readErr
	}
	g := &m.GPUs[l.gpu]
	if l.layout.at.Find(g) == nil {
		return errors.New("a partition was removed that a process holds")
	}
	if err == nil {
		r, err := l.n.Record(claim.GetUid())
		if err != nil || r == nil || r.State != harness.StateReleasing {
			return fmt.Errorf("the call succeeded and the journal says %+v (%w)", r, err)
		}
		return nil
	}
	for _, want := range []string{g.PCIAddress, "nvmlComputeInstanceDestroy"} {
		if !strings.Contains(err.Error(), want) {
			return fmt.Errorf("the error does not name %s: %w", want, err)
		}
	}
	named := strings.Contains(err.Error(), fmt.Sprintf("process %d", trainer+l.gpu))
	if !named && !c.isAnswer() && !strings.Contains(err.Error(), c.fault.Function) {
		return fmt.Errorf("the error names neither the process nor %s: %w", c.fault.Function, err)
	}
	return nil
}
