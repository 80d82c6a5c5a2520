// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"maps"
	"slices"
	"strconv"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestFaultsOfFirstCalls is TestFaults for what a process looks up once and then
// keeps: every case has a process of its own.
func TestFaultsOfFirstCalls(t *testing.T) {
	t.Parallel()
	header := readHeader(t)
	layout := faultLayouts["partition"]
	first := firstCalls(t, layout)
	var cases []faultCase
	for _, function := range slices.Sorted(maps.Keys(first)) {
		codes, err := header.codes(function)
		if err != nil {
			t.Fatal(err)
		}
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
				l := &lane{faultRig: r, gpu: 0, neighbour: 1}
				if err := l.run(t.Context(), c); err != nil {
					t.Errorf("%s: %v", c, err)
				}
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
	l := &lane{faultRig: r, gpu: 0, neighbour: 1}
	claim, err := l.begin(t.Context(), harness.Prepare)
	if err != nil {
		t.Fatal(err)
	}
	first := r.countCalls(t, func() {
		if _, err := r.p.Call(t.Context(), harness.Prepare, claim, harness.KubeletTimeout); err != nil {
			t.Fatal(err)
		}
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
