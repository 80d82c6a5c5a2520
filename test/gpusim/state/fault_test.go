// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func TestAddAndRemoveFaults(t *testing.T) {
	m := &machine.Machine{}
	first := AddFault(m, machine.Fault{ID: 7, Function: "a"})
	second := AddFault(m, machine.Fault{Function: "b"})
	third := AddFault(m, machine.Fault{Function: "c"})
	if first != 1 || second != 2 || third != 3 {
		t.Errorf("IDs %d, %d and %d, want 1, 2 and 3", first, second, third)
	}
	if !RemoveFault(m, second) || RemoveFault(m, second) {
		t.Error("the second fault is not removed exactly once")
	}
	fourth := AddFault(m, machine.Fault{Function: "d"})
	want := []machine.Fault{{ID: 1, Function: "a"}, {ID: 3, Function: "c"}, {ID: 4, Function: "d"}}
	if diff := cmp.Diff(want, m.Faults); fourth != 4 || diff != "" {
		t.Errorf("ID %d, faults (-want +got):\n%s", fourth, diff)
	}
}

// TestFaultsThatDoNotFit: an error has to name the field, for it is a test's
// author who reads it.
func TestFaultsThatDoNotFit(t *testing.T) {
	m := full()
	_, f := create(t, m)
	fault := func(change func(*machine.Fault)) func(*machine.Machine) {
		return func(m *machine.Machine) { change(&m.Faults[0]) }
	}
	latency := func(change func(*machine.Latency)) func(*machine.Machine) {
		return func(m *machine.Machine) { change(&m.Latencies[1]) }
	}
	for want, change := range map[string]func(*machine.Machine){
		"33 faults, at most 32 fit":    func(m *machine.Machine) { m.Faults = make([]machine.Fault, 33) },
		"49 latencies, at most 48 fit": func(m *machine.Machine) { m.Latencies = make([]machine.Latency, 49) },
		"have the ID":                  func(m *machine.Machine) { m.Faults[1].ID = m.Faults[0].ID },
		"ID is less than 1":            fault(func(f *machine.Fault) { f.ID = 0 }),
		"function is empty":            fault(func(f *machine.Fault) { f.Function = "" }),
		"function, at most":            fault(func(f *machine.Fault) { f.Function = strings.Repeat("x", 96) }),
		"GPU 2 of 2":                   fault(func(f *machine.Fault) { f.GPU = 2 }),
		"GPU -2 of 2":                  fault(func(f *machine.Fault) { f.GPU = -2 }),
		"skip -1":                      fault(func(f *machine.Fault) { f.Skip = -1 }),
		"times 1099511627776":          fault(func(f *machine.Fault) { f.Times = 1 << 40 }),
		"probability 1.5":              fault(func(f *machine.Fault) { f.Probability = 1.5 }),
		"probability NaN":              fault(func(f *machine.Fault) { f.Probability = math.NaN() }),
		"delay -1s":                    fault(func(f *machine.Fault) { f.Delay = -time.Second }),
		"effect 6":                     fault(func(f *machine.Fault) { f.Effect = machine.Proceed + 1 }),
		"code":                         fault(func(f *machine.Fault) { f.Code = 1 << 40 }),
		"latency 1: function":          latency(func(l *machine.Latency) { l.Function = "" }),
		"has a latency already":        latency(func(l *machine.Latency) { l.Function = m.Latencies[0].Function }),
		"base -1ns":                    latency(func(l *machine.Latency) { l.Base = -1 }),
		"per instance -1ns":            latency(func(l *machine.Latency) { l.PerInstance = -1 }),
		"failure 1099511627776":        func(m *machine.Machine) { m.GPUs[0].Failure = 1 << 40 },
	} {
		err := f.Update(func(m *machine.Machine) error {
			change(m)
			return nil
		})
		expect.Says(t, err, want)
	}
	expect.Same(t, snapshot(t, f), full(), "the machine changed")
}

// TestAsManyFaultsAsFit also puts new ones in the place of all, which they
// share no counts with, and does it often enough to use every place for counts.
func TestAsManyFaultsAsFit(t *testing.T) {
	_, f := create(t, full())
	var want *machine.Machine
	for round := range 20 {
		err := f.Update(func(m *machine.Machine) error {
			m.Faults, m.Latencies = nil, nil
			for i := range 32 {
				m.Faults = append(m.Faults, machine.Fault{ID: 32*round + i + 1, Function: "*", GPU: -1})
			}
			for i := range 48 {
				m.Latencies = append(m.Latencies, machine.Latency{Function: strings.Repeat("x", i+1)})
			}
			want = m
			return nil
		})
		must.Do(t, err)
		if diff := cmp.Diff(want, snapshot(t, f)); diff != "" {
			t.Fatalf("round %d (-want +got):\n%s", round, diff)
		}
	}
}
