// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// workers is how many cases run at a time on one machine, on two GPUs each.
const workers = 8

// faultLayouts are the kinds of claims whose NVML calls differ.
var faultLayouts = map[string]faultLayout{
	"whole": {machine: "h100x16"},
	"whole in MIG mode": {
		machine: "h100x16", before: func(g *machine.GPU) { g.MIG.Current, g.MIG.Pending = true, true },
	},
	"partition":                   {machine: "h100x16", at: harness.Place{Profile: "1g.10gb", Start: 0}, next: harness.Place{Profile: "2g.20gb", Start: 0}, beside: harness.Place{Profile: "3g.40gb", Start: 4}},
	"partition turns MIG mode on": {machine: "h100x16", at: harness.Place{Profile: "1g.10gb", Start: 4}, next: harness.Place{Profile: "2g.20gb", Start: 4}},
	"Ampere whole":                {machine: "a100-80x16"},
	"Ampere partition":            {machine: "a100-80x16", change: harness.TurnMIGOn, at: harness.Place{Profile: "2g.20gb", Start: 2}, next: harness.Place{Profile: "1g.10gb", Start: 2}},
	// These take time, so that only calls count that others do not make, and some
	// of the codes.
	"MPS share": {machine: "h100x16", kind: harness.MPS},
}

// some leaves codes out that make no difference where cases take time.
func (l faultLayout) some(codes []code) []code {
	if !l.usesMPS() {
		return codes
	}
	kept := []string{"NO_PERMISSION", "GPU_IS_LOST", "RESET_REQUIRED", "UNKNOWN", "NOT_SUPPORTED"}
	return slices.DeleteFunc(codes, func(c code) bool { return !slices.Contains(kept, c.name) })
}

// usesMPS reports whether a session runs while a claim is prepared.
func (l faultLayout) usesMPS() bool { return l.kind == harness.MPS }

// faultLayout is a machine and one device on each of its GPUs.
type faultLayout struct {
	machine string
	change  func(*machine.Machine)
	// at is the partition of the claims; none: the whole GPU.
	at harness.Place
	// next is what a later claim has in the place of a partition. It is another partition, so that it has another UUID.
	next harness.Place
	kind harness.ShareKind
	// beside is a partition on the same GPU that stays. Optional.
	beside harness.Place
	// before puts a GPU into the state in which each case begins. Optional.
	before func(*machine.GPU)
}

// TestFaults makes every NVML call of preparing and unpreparing go wrong in
// every way in which it can, and then holds it until a claim on another GPU has come and
// gone, one by one.
//
// The calls are those that the library counts while nothing goes wrong, the
// return codes those that nvml.h lists for them.
func TestFaults(t *testing.T) {
	t.Parallel()
	header := readHeader(t)
	count, slow := harness.Enumerate(t, "faults", 2100), harness.Enumerate(t, "slow calls", 98)
	for name, layout := range faultLayouts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newFaultRig(t, layout, workers)
			calls := r.countAll(t)
			r.runAll(t, count, name, r.cases(t, header, calls), (*worker).run)
			r.runAll(t, slow, name, slowCases(calls), (*worker).runSlow)
		})
	}
}

// faultRig is a driver on a machine with a layout.
type faultRig struct {
	n      *harness.Node
	p      *harness.Driver
	layout faultLayout
	// mode is the MIG mode in which the GPUs are before and after all cases.
	mode bool
}

// newFaultRig has room for some workers, which have two GPUs each.
func newFaultRig(t *testing.T, layout faultLayout, workers int) *faultRig {
	t.Helper()
	change := layout.change
	if change == nil {
		change = func(*machine.Machine) {}
	}
	r := &faultRig{n: harness.NewNode(t, layout.machine, change), layout: layout}
	if layout.usesMPS() {
		r.n.StartSupervisor(t)
	}
	r.start(t)
	if layout.beside.Profile != "" {
		for gpu := range 2 * workers {
			r.p.NewClaim(t, r.n, harness.Partition(gpu, layout.beside.Profile, layout.beside.Start))
		}
	}
	r.mode = r.n.MIGMode(t)[0]
	return r
}

// start runs a driver that calls nothing by itself any more, which would be counted and use up
// faults: it reads the health of each GPU and cleans up once, maybe later than it is ready.
func (r *faultRig) start(t *testing.T) {
	t.Helper()
	const lastOfReading = "nvmlDeviceGetTemperatureV"
	before := must.Get(r.n.State.Calls())(t)
	r.p = r.n.Start(t, slices.Concat(harness.Quiet, patient)...)
	r.p.Ready(t)
	gpus := len(r.n.Machine(t).GPUs)
	last, quiet := before, time.Now()
	r.p.Until(t, "the health of all GPUs to be read, and the driver to call nothing any more", func(context.Context) error {
		now, err := r.n.State.Calls()
		if err != nil {
			return err
		}
		if !maps.Equal(now, last) {
			last, quiet = now, time.Now()
		}
		if read := int(now[lastOfReading] - before[lastOfReading]); read < gpus {
			return fmt.Errorf("that of %d is", read)
		}
		if since := time.Since(quiet); since < 200*time.Millisecond {
			return fmt.Errorf("it called something %s ago", since)
		}
		return nil
	})
}

// runAll runs the cases that are in the sample on all workers.
func (r *faultRig) runAll(
	t *testing.T, count *harness.Enumeration, kind string, cases []faultCase, run func(*worker, context.Context, faultCase) error,
) {
	t.Helper()
	r.runEach(t, count, kind, harness.Choose(count, cases), run)
}

func (r *faultRig) runEach(
	t *testing.T, count *harness.Enumeration, kind string, cases []faultCase, run func(*worker, context.Context, faultCase) error,
) {
	t.Helper()
	next := make(chan faultCase)
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			l := &worker{faultRig: r, gpu: 2 * i, neighbour: 2*i + 1}
			for c := range next {
				expect.Do(t, run(l, t.Context(), c), c)
				count.Ran(kind)
			}
		})
	}
	for _, c := range cases {
		next <- c
	}
	close(next)
	wg.Wait()
}

// callCounts is how often operations call each function.
type callCounts map[harness.Operation]map[string]int

// countAll counts the calls that a layout is about.
func (r *faultRig) countAll(t *testing.T) callCounts {
	t.Helper()
	all := callCounts{}
	for _, o := range []harness.Operation{harness.Prepare, harness.Unprepare} {
		counts := r.count(t, o)
		if r.layout.usesMPS() {
			maps.DeleteFunc(counts, func(function string, _ int) bool { return !strings.Contains(function, "ComputeMode") })
		}
		all[o] = counts
	}
	if len(all[harness.Prepare])+len(all[harness.Unprepare]) == 0 {
		t.Fatal("no NVML call was counted")
	}
	return all
}

// each calls do for every function, in order.
func (c callCounts) each(do func(o harness.Operation, function string, calls int)) {
	for _, o := range []harness.Operation{harness.Prepare, harness.Unprepare} {
		for _, function := range slices.Sorted(maps.Keys(c[o])) {
			do(o, function, c[o][function])
		}
	}
}

// cases are all ways in which one call of an operation can go wrong.
func (r *faultRig) cases(t *testing.T, header *nvmlHeader, counts callCounts) []faultCase {
	t.Helper()
	var cases []faultCase
	counts.each(func(o harness.Operation, function string, calls int) {
		codes := must.Get(header.codes(function))(t)
		cases = append(cases, ways(o, function, calls, r.layout.some(codes))...)
	})
	return cases
}

// count tells how often an operation calls each function while all is well. The
// second time counts, when everything that is kept has been read.
func (r *faultRig) count(t *testing.T, o harness.Operation) map[string]int {
	t.Helper()
	l := &worker{faultRig: r, gpu: 0, neighbour: 1}
	must.Do(t, l.roundTrip(t.Context(), l.gpu))
	claim := must.Get(l.begin(t.Context(), o))(t)
	counts := r.countCalls(t, func() {
		must.Get(r.p.Call(t.Context(), o, claim, harness.KubeletTimeout))(t)
	})
	must.Do(t, r.p.TryUnprepare(t.Context(), claim, harness.KubeletTimeout))
	return counts
}

// countCalls tells how often each function is called while f runs. The driver waits for events
// by itself, whatever claims do, and looks at times whether a GPU is still the same: faults of
// these calls are those of TestSimulatedEvents… in package nvml. Those of nvidia-smi are in TestFaultsOfIntervals.
func (r *faultRig) countCalls(t *testing.T, f func()) map[string]int {
	t.Helper()
	before := must.Get(r.n.State.Calls())(t)
	f()
	after := must.Get(r.n.State.Calls())(t)
	counts := map[string]int{}
	for function, calls := range after {
		if made := int(calls - before[function]); made > 0 && !strings.Contains(function, "Event") {
			counts[function] = made
		}
	}
	return counts
}

// begin allocates a claim on the worker's GPU and does what the operation needs to
// have happened.
func (l *worker) begin(ctx context.Context, o harness.Operation) (claim *drapb.Claim, err error) {
	if l.layout.before != nil {
		err := l.n.State.Update(func(m *machine.Machine) error {
			l.layout.before(&m.GPUs[l.gpu])
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	claim, err = l.allocateOn(l.gpu)
	if err == nil && o == harness.Unprepare {
		_, err = l.p.TryPrepare(ctx, claim, harness.KubeletTimeout)
	}
	return claim, err
}

// TestFaultsOfFirstCalls is TestFaults for what a process looks up once and then
// keeps: every case has a process of its own.
func TestFaultsOfFirstCalls(t *testing.T) {
	t.Parallel()
	header := readHeader(t)
	layout := faultLayouts["partition"]
	first := firstCalls(t, layout)
	var cases []faultCase
	for _, function := range slices.Sorted(maps.Keys(first)) {
		codes := must.Get(header.codes(function))(t)
		cases = append(cases, ways(harness.Prepare, function, first[function], codes)...)
	}
	count := harness.Enumerate(t, "faults", 43)
	next := make(chan faultCase, len(cases))
	for _, c := range harness.Choose(count, cases) {
		next <- c
	}
	close(next)
	const machines = 4
	for i := range machines {
		t.Run("machine "+strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			var r *faultRig
			for c := range next {
				if r == nil {
					r = newFaultRig(t, layout, 1)
				}
				r.restart(t)
				l := &worker{faultRig: r, gpu: 0, neighbour: 1}
				expect.Do(t, l.run(t.Context(), c), c)
				count.Ran(c.fault.Function)
			}
		})
	}
}

// firstCalls are the functions that the first Prepare of a process calls more
// often than a later one, and how often it does.
func firstCalls(t *testing.T, layout faultLayout) map[string]int {
	t.Helper()
	r := newFaultRig(t, layout, 1)
	r.restart(t)
	l := &worker{faultRig: r, gpu: 0, neighbour: 1}
	claim := must.Get(l.begin(t.Context(), harness.Prepare))(t)
	first := r.countCalls(t, func() {
		must.Get(r.p.Call(t.Context(), harness.Prepare, claim, harness.KubeletTimeout))(t)
	})
	r.p.MustUnprepare(t, claim)
	later := r.count(t, harness.Prepare)
	maps.DeleteFunc(first, func(function string, calls int) bool { return calls <= later[function] })
	if len(first) == 0 {
		t.Fatal("the first Prepare of a process calls nothing more often than a later one")
	}
	t.Logf("looked up once: %v", slices.Sorted(maps.Keys(first)))
	return first
}

// restart replaces the driver by one that has looked nothing up for claims yet.
func (r *faultRig) restart(t *testing.T) {
	t.Helper()
	r.p.Kill()
	r.start(t)
}
