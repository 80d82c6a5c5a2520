// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
)

const (
	pciA = "0000:1b:00.0"
	pciB = "0000:2c:00.0"
)

var (
	start = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	one   = &Place{UUID: "MIG-1", ProfileID: 19, Placement: gpu.Placement{Start: 2, Size: 1}}
	two   = &Place{UUID: "MIG-2", ProfileID: 19, Placement: gpu.Placement{Start: 3, Size: 1}}
)

// timedJudge is a judge with a clock.
type timedJudge struct {
	*judge
	now      time.Time
	reaction policy.Health
}

func newTimedJudge() *timedJudge {
	s := &timedJudge{judge: newJudge(), now: start, reaction: policy.Builtin().Health}
	s.follow(pciA, "GPU-A")
	s.follow(pciB, "GPU-B")
	for _, pci := range []string{pciA, pciB} {
		// Of a driver without recovery actions, unless a test has another.
		s.gpus[pci].AskedAt = start
	}
	return s
}

// step is something that happens to the first GPU, or is looked at.
type step func(s *timedJudge)

func after(d time.Duration) step { return func(s *timedJudge) { s.now = s.now.Add(d) } }

func xidEvent(number uint64, at *Place) step {
	return func(s *timedJudge) {
		s.event(gpu.Event{Time: s.now, PCIAddress: pciA, Kind: gpu.EventXID, XID: number}, at, &s.reaction)
	}
}

func event(kind gpu.EventKind) step {
	return func(s *timedJudge) { s.event(gpu.Event{Time: s.now, PCIAddress: pciA, Kind: kind}, nil, &s.reaction) }
}

// reads is a reading that takes a second.
func reads(h gpu.Health, err error) step {
	return func(s *timedJudge) {
		began := s.now.Add(time.Second)
		s.now = began.Add(time.Second)
		s.read(pciA, reading{Began: began, Ended: s.now, Health: h, Err: err})
		s.settle(pciA, s.reaction.QuietPeriod, s.now)
	}
}

func well() step         { return reads(gpu.Health{}, nil) }
func wantsNothing() step { return reads(gpu.Health{RecoveryAction: gpu.RecoveryNone}, nil) }
func wantsReset() step   { return reads(gpu.Health{RecoveryAction: gpu.RecoveryReset}, nil) }
func fails(err error) step {
	return reads(gpu.Health{}, fmt.Errorf("nvmlDeviceGetFieldValues: %w", err))
}
func errorsOf(n uint64) step { return reads(gpu.Health{UncorrectedECC: &n}, nil) }

// neverAsked is a GPU of whose driver nothing is known.
func neverAsked() step { return func(s *timedJudge) { s.gpus[pciA].AskedAt = time.Time{} } }

// fabricNotAsked is a reading while there are partitions.
func fabricNotAsked() step {
	return func(s *timedJudge) {
		s.now = s.now.Add(time.Second)
		s.read(pciA, reading{Began: s.now, Ended: s.now, FabricNotAsked: true})
		s.settle(pciA, s.reaction.QuietPeriod, s.now)
	}
}

func lives(uuids ...string) step {
	return func(s *timedJudge) {
		s.now = s.now.Add(time.Second)
		var instances []gpu.Instance
		for i, uuid := range uuids {
			instances = append(instances, gpu.Instance{ID: i, Compute: []gpu.ComputeInstance{{UUID: uuid}}})
		}
		s.dropGonePartitions(pciA, instances, s.now)
	}
}

func reacts(change func(h *policy.Health)) step {
	return func(s *timedJudge) {
		s.reaction = policy.Health{QuietPeriod: s.reaction.QuietPeriod, XIDs: map[uint64]policy.Effect{}, Conditions: map[string]policy.Effect{}}
		change(&s.reaction)
	}
}

// short is "xid=94 NoSchedule at 2:1".
func short(c device.Condition) string {
	text := string(c.Reason)
	if c.Value != "" {
		text += "=" + c.Value
	}
	text += " " + string(c.EffectInForce())
	if c.Where != nil {
		text += fmt.Sprintf(" at %d:%d", c.Where.Start, c.Where.Size)
	}
	if c.PCIAddress != pciA {
		text += " on " + c.PCIAddress
	}
	return text
}

func TestJudge(t *testing.T) {
	const quiet = 10 * time.Minute
	// shows is what there must be at this point.
	type shows string
	lost := fails(gpu.ErrLost)
	reset := event(gpu.EventReset)
	pending := reads(gpu.Health{FabricPending: "In Progress"}, nil)
	for name, steps := range map[string][]any{
		"all is well": {well(), shows(""), wantsNothing(), shows("")},

		"an error of a program is no fault":        {xidEvent(13, one), xidEvent(31, nil), xidEvent(43, nil), xidEvent(45, one), xidEvent(68, one), xidEvent(109, one), shows("")},
		"a partition":                              {xidEvent(94, one), shows("xid=94 NoSchedule at 2:1")},
		"two partitions":                           {xidEvent(94, one), xidEvent(94, two), shows("xid=94 NoSchedule at 2:1; xid=94 NoSchedule at 3:1")},
		"no partition":                             {xidEvent(94, nil), shows("xid=94 NoSchedule")},
		"all of the GPU, whatever the event names": {xidEvent(95, one), shows("xid=95 NoExecute")},
		"an unknown one":                           {xidEvent(9999, one), shows("xid=9999 None at 2:1")},
		"an encoder":                               {xidEvent(47, nil), xidEvent(65, nil), xidEvent(73, nil), xidEvent(142, one), xidEvent(174, one), shows("")},
		"a minor one after a grave one":            {xidEvent(95, nil), xidEvent(94, nil), xidEvent(31, nil), xidEvent(92, nil), shows("xid=92 None; xid=94 NoSchedule; xid=95 NoExecute")},

		"quiet":            {xidEvent(94, nil), after(quiet - 3*time.Second), well(), shows("xid=94 NoSchedule"), after(time.Second), well(), shows("")},
		"not quiet":        {xidEvent(94, nil), after(quiet / 2), xidEvent(94, nil), after(quiet - 3*time.Second), well(), shows("xid=94 NoSchedule")},
		"a reset is ready": {xidEvent(94, nil), after(time.Second), reset, well(), shows("")},

		"its partition ends":           {xidEvent(94, one), lives("MIG-1"), shows("xid=94 NoSchedule at 2:1"), lives("MIG-2"), shows("")},
		"a look from before the event": {lives(), xidEvent(94, one), shows("xid=94 NoSchedule at 2:1")},

		"no reset, driver does not say": {xidEvent(95, nil), after(24 * time.Hour), well(), shows("xid=95 NoExecute")},
		"a reset that was seen":         {xidEvent(95, nil), after(time.Minute), reset, well(), shows("")},
		"a reset from before":           {reset, after(time.Second), xidEvent(95, nil), well(), shows("xid=95 NoExecute")},
		"the driver wants a reset":      {xidEvent(95, nil), wantsReset(), shows("xid=95 NoExecute; recovery-required=reset NoSchedule"), after(24 * time.Hour), wantsReset(), shows("xid=95 NoExecute; recovery-required=reset NoSchedule")},
		"what the driver wants is done": {xidEvent(95, nil), wantsReset(), wantsNothing(), shows("")},
		"the driver wants no reset":     {xidEvent(95, nil), wantsNothing(), shows("xid=95 None"), after(quiet - 3*time.Second), wantsNothing(), shows("xid=95 None"), after(3 * time.Second), wantsNothing(), shows("")},
		"nobody is evicted before the driver is asked": {
			wantsNothing(), xidEvent(95, nil), shows("xid=95 NoSchedule"), wantsReset(), shows("xid=95 NoExecute; recovery-required=reset NoSchedule"), wantsNothing(), shows("")},
		"nor if it wants nothing": {wantsNothing(), xidEvent(95, nil), xidEvent(94, one), wantsNothing(), shows("xid=94 None at 2:1; xid=95 None"), xidEvent(95, nil), shows("xid=94 None at 2:1; xid=95 NoSchedule"), wantsNothing(), shows("xid=94 None at 2:1; xid=95 None")},
		"asked for the first time": {
			neverAsked(), xidEvent(95, nil), shows("xid=95 NoSchedule"), fails(gpu.ErrUnknown), shows("xid=95 NoSchedule"),
			lost, shows("xid=95 NoSchedule; gpu-lost NoSchedule"), reads(gpu.Health{Temperature: new(40)}, gpu.ErrUnknown), shows("")},
		"a driver without recovery actions":  {neverAsked(), xidEvent(95, nil), well(), shows("xid=95 NoExecute")},
		"the GPU is lost":                    {wantsNothing(), xidEvent(79, nil), shows("xid=79 NoSchedule"), lost, shows("xid=79 NoExecute; gpu-lost NoSchedule")},
		"it hangs":                           {wantsNothing(), xidEvent(119, nil), fails(gpu.ErrHung), shows("xid=119 NoSchedule; unresponsive NoSchedule")},
		"again, and it is wanted already":    {xidEvent(95, nil), wantsReset(), xidEvent(95, nil), shows("xid=95 NoExecute; recovery-required=reset NoSchedule")},
		"the action alone is not read":       {wantsNothing(), xidEvent(95, nil), reads(gpu.Health{Temperature: new(40)}, gpu.ErrUnknown), shows("xid=95 NoSchedule")},
		"an action that is there no more":    {wantsNothing(), xidEvent(95, nil), wantsNothing(), well(), shows("xid=95 None"), xidEvent(95, nil), well(), shows("xid=95 NoSchedule")},
		"silence is no consent":              {xidEvent(95, nil), wantsNothing(), after(2 * quiet), fails(gpu.ErrUnknown), shows("xid=95 None"), wantsNothing(), shows("")},
		"a reset although nothing is wanted": {wantsNothing(), xidEvent(95, nil), wantsNothing(), reset, wantsNothing(), shows("")},
		"an answer from before": {wantsNothing(), xidEvent(95, nil), step(func(s *timedJudge) {
			s.read(pciA, reading{Began: s.now.Add(-time.Second), Health: gpu.Health{RecoveryAction: gpu.RecoveryNone}})
		}), shows("xid=95 NoSchedule")},
		"the policy, not the driver":     {reacts(func(h *policy.Health) { h.XIDs[95] = policy.EffectNoExecute }), wantsNothing(), xidEvent(95, nil), wantsNothing(), shows("xid=95 NoExecute")},
		"later the driver wants a reset": {xidEvent(94, nil), wantsNothing(), shows("xid=94 None"), wantsReset(), shows("xid=94 NoSchedule; recovery-required=reset NoSchedule")},
		"held back, although the driver wants nothing now": {
			xidEvent(95, nil), wantsReset(), wantsNothing(), shows(""), xidEvent(95, nil), wantsReset(), wantsNothing(), shows("xid=95 NoSchedule; recovery-required=reset NoSchedule")},
		"another action":                      {reads(gpu.Health{RecoveryAction: "Drain and Reset"}, nil), shows("recovery-required=drain-and-reset NoSchedule")},
		"memory errors start at 0 in a reset": {errorsOf(3), xidEvent(95, nil), errorsOf(3), shows("xid=95 NoExecute"), errorsOf(0), shows("")},

		"lost and back":                       {lost, shows("gpu-lost NoSchedule"), lost, well(), shows("")},
		"lost and back ends what wants reset": {xidEvent(79, nil), lost, shows("xid=79 NoExecute; gpu-lost NoSchedule"), well(), shows("")},
		"not found":                           {fails(gpu.ErrNotFound), shows("gpu-lost NoSchedule")},
		"an event, then it answers":           {event(gpu.EventLost), shows("gpu-lost NoSchedule"), well(), shows("")},
		"reset required":                      {xidEvent(62, nil), fails(gpu.ErrResetRequired), shows("xid=62 NoExecute; reset-required NoSchedule"), well(), shows("")},
		"lost, then reset required":           {lost, fails(gpu.ErrResetRequired), shows("reset-required NoSchedule")},
		"hung and back ends nothing else":     {xidEvent(119, nil), fails(gpu.ErrHung), shows("xid=119 NoExecute; unresponsive NoSchedule"), well(), shows("xid=119 NoExecute")},
		"lost, then hung":                     {lost, fails(gpu.ErrHung), shows("gpu-lost NoSchedule; unresponsive NoSchedule")},
		"the driver is gone":                  {fails(gpu.ErrDriverNotLoaded), shows("")},
		"the driver is loaded anew":           {well(), xidEvent(119, nil), fails(gpu.ErrDriverNotLoaded), shows("xid=119 NoExecute"), well(), shows("")},
		"the driver is not loaded yet":        {xidEvent(119, nil), fails(gpu.ErrDriverNotLoaded), well(), shows("xid=119 NoExecute")},
		"an unknown failure proves nothing": {
			reads(gpu.Health{Unrepairable: true}, nil), fails(gpu.ErrUnknown), shows("memory-unrepairable NoSchedule"), well(), shows("")},
		"nor of a GPU that was lost": {
			xidEvent(79, nil), lost, fails(gpu.ErrUnknown), shows("xid=79 NoExecute; gpu-lost NoSchedule"), well(), shows("")},
		"an unknown failure of a part proves that it answers": {
			xidEvent(79, nil), lost, reads(gpu.Health{Temperature: new(40)}, gpu.ErrUnknown), shows("")},

		"memory": {
			reads(gpu.Health{RepairPending: true}, nil), shows("row-remap-pending None"),
			reads(gpu.Health{RepairPending: true, RowRemapFailed: true}, nil), shows("row-remap-pending None; row-remap-failed NoSchedule"),
			reads(gpu.Health{RepairPending: true, Unrepairable: true}, nil), shows("row-remap-pending None; memory-unrepairable NoSchedule"), well(), shows("")},
		"pages that will be retired": {xidEvent(63, nil), reads(gpu.Health{RepairPending: true}, nil), shows("row-remap-pending None"), well(), shows("")},
		"memory errors are counted":  {errorsOf(2), shows(""), errorsOf(3), shows("uncorrected-ecc NoSchedule"), after(quiet), errorsOf(3), shows("")},
		"memory errors are events":   {errorsOf(2), event(gpu.EventUncorrectedECC), shows("uncorrected-ecc NoSchedule"), errorsOf(3), shows("uncorrected-ecc NoSchedule")},
		"fabric":                     {reads(gpu.Health{FabricUnhealthy: "degraded bandwidth"}, nil), shows("fabric-unhealthy NoSchedule"), well(), shows("")},
		"fabric that is joined soon": {
			reads(gpu.Health{FabricPending: "In Progress"}, nil), shows(""), after(time.Minute - 3*time.Second), reads(gpu.Health{FabricPending: "In Progress"}, nil), shows(""), well(), shows("")},
		"fabric that is never joined": {
			reads(gpu.Health{FabricPending: "Not Started"}, nil), after(time.Minute), reads(gpu.Health{FabricPending: "In Progress"}, nil), shows("fabric-unhealthy NoSchedule"),
			after(time.Hour), reads(gpu.Health{FabricPending: "In Progress"}, nil), shows("fabric-unhealthy NoSchedule"), well(), shows("")},
		"fabric that is joined between": {pending, after(time.Minute), well(), pending, shows("")},
		"fabric that was not asked now and then": {
			pending, after(40 * time.Second), reads(gpu.Health{Temperature: new(40)}, gpu.ErrUnknown), fails(gpu.ErrUnknown), after(20 * time.Second), pending, shows("fabric-unhealthy NoSchedule"),
			reads(gpu.Health{Temperature: new(40)}, gpu.ErrUnknown), fabricNotAsked(), after(time.Hour), shows("fabric-unhealthy NoSchedule"), well(), shows("")},
		"fabric with partitions for some time": {
			pending, after(30 * time.Second), fabricNotAsked(), after(30 * time.Second), pending, shows("fabric-unhealthy NoSchedule")},
		"fabric after a reset": {pending, reset, after(time.Minute), pending, shows("")},
		"hot for a moment":     {reads(gpu.Health{Throttling: []gpu.Throttling{gpu.ThrottlingHardwareThermal}}, nil), shows(""), after(time.Hour), well(), reads(gpu.Health{Throttling: []gpu.Throttling{gpu.ThrottlingPowerBrake}}, nil), shows("")},
		"hot":                  {reads(gpu.Health{Throttling: []gpu.Throttling{gpu.ThrottlingHardwareThermal}}, nil), after(time.Minute), reads(gpu.Health{Throttling: []gpu.Throttling{gpu.ThrottlingSoftwareThermal}}, nil), shows("throttled None"), well(), shows("throttled None"), after(time.Minute), well(), shows("")},
		"hot now and then":     {reads(gpu.Health{Throttling: []gpu.Throttling{gpu.ThrottlingHardwareThermal}}, nil), after(time.Minute), reads(gpu.Health{Throttling: []gpu.Throttling{gpu.ThrottlingHardwareThermal}}, nil), after(40 * time.Second), well(), reads(gpu.Health{Throttling: []gpu.Throttling{gpu.ThrottlingHardwareThermal}}, nil), after(40 * time.Second), well(), shows("throttled None")},

		"flapping: held back from the second time": {
			lost, well(), shows(""),
			lost, well(), shows("gpu-lost NoSchedule"), after(quiet), well(), shows(""),
			lost, well(), after(quiet), well(), shows("gpu-lost NoSchedule"), after(quiet), well(), shows("")},
		"flapping: quiet for longer each time": {
			xidEvent(94, nil), after(quiet), well(), shows(""),
			xidEvent(94, nil), after(quiet), well(), shows("xid=94 NoSchedule"), after(quiet), well(), shows(""),
			xidEvent(94, nil), after(3 * quiet), well(), shows("xid=94 NoSchedule"), after(quiet), well(), shows("")},
		"flapping: again while it is held back": {
			lost, well(), lost, well(), lost, well(), after(quiet), well(), shows("gpu-lost NoSchedule"), after(quiet), well(), shows("")},
		"a week later": {lost, well(), after(8 * 24 * time.Hour), well(), lost, well(), shows("")},

		"the policy evicts": {
			reacts(func(h *policy.Health) {
				h.Conditions["gpu-lost"] = policy.EffectNoExecute
				h.XIDs[109] = policy.EffectNoSchedule
			}),
			xidEvent(109, one), lost, shows("xid=109 NoSchedule at 2:1; gpu-lost NoExecute")},
		"the policy ignores":     {xidEvent(95, nil), reacts(func(h *policy.Health) { h.XIDs[95] = policy.EffectIgnore }), shows("")},
		"the policy has changed": {xidEvent(95, nil), reacts(func(h *policy.Health) { h.XIDs[95] = policy.EffectNone }), shows("xid=95 None"), reacts(func(*policy.Health) {}), shows("xid=95 NoExecute")},

		"another GPU in its place": {xidEvent(95, nil), step(func(s *timedJudge) { s.follow(pciA, "GPU-C") }), shows("")},
		"of an unknown GPU": {step(func(s *timedJudge) {
			s.event(gpu.Event{PCIAddress: "0000:99:00.0", Kind: gpu.EventXID, XID: 95, Time: s.now}, nil, &s.reaction)
			s.read("0000:99:00.0", reading{Err: gpu.ErrLost})
			s.settle("0000:99:00.0", quiet, s.now)
			s.dropGonePartitions("0000:99:00.0", nil, s.now)
		}), shows("")},
		"of the other GPU": {step(func(s *timedJudge) {
			s.event(gpu.Event{PCIAddress: pciB, Kind: gpu.EventXID, XID: 95, Time: s.now}, nil, &s.reaction)
		}), well(), shows("xid=95 NoExecute on " + pciB)},
	} {
		t.Run(name, func(t *testing.T) {
			s := newTimedJudge()
			for n, todo := range steps {
				switch todo := todo.(type) {
				case step:
					todo(s)
				case shows:
					var got []string
					for _, c := range s.conditions(&s.reaction) {
						got = append(got, short(c))
						if c.Message == "" || strings.HasSuffix(c.Message, ".") {
							t.Errorf("message %q", c.Message)
						}
						if c.Exact != (c.Where != nil) {
							t.Errorf("not exactly one partition: %+v", c)
						}
					}
					if diff := cmp.Diff(string(todo), strings.Join(got, "; ")); diff != "" {
						t.Errorf("step %d (-want +got):\n%s", n, diff)
					}
				default:
					t.Fatalf("step %d is a %T", n, todo)
				}
			}
		})
	}
}

// TestHoldIsBounded: a GPU that fails all the time is tried again once a day.
func TestHoldIsBounded(t *testing.T) {
	s := newTimedJudge()
	for range 50 {
		fails(gpu.ErrLost)(s)
		well()(s)
	}
	after(longestHold)(s)
	well()(s)
	if got := s.conditions(&s.reaction); len(got) != 0 {
		t.Errorf("a day after the last failure: %v", got)
	}
	for _, tc := range []struct {
		quiet time.Duration
		times int
		want  time.Duration
	}{
		{time.Minute, 0, time.Minute}, {time.Minute, 3, 8 * time.Minute}, {time.Minute, 99, 128 * time.Minute},
		{20 * time.Hour, 1, longestHold}, {24 * time.Hour, 9, longestHold}, {time.Hour, 9, longestHold},
	} {
		if got := longer(tc.quiet, tc.times); got != tc.want {
			t.Errorf("%s, %d times before: %s, want %s", tc.quiet, tc.times, got, tc.want)
		}
	}
}

// TestReadingFromBefore: what began before the event says nothing of it.
func TestReadingFromBefore(t *testing.T) {
	s := newTimedJudge()
	began := s.now
	s.now = s.now.Add(time.Second)
	event(gpu.EventLost)(s)
	s.read(pciA, reading{Began: began, Ended: s.now.Add(time.Second)})
	s.settle(pciA, time.Minute, s.now.Add(time.Hour))
	if got := s.conditions(&s.reaction); len(got) != 1 {
		t.Errorf("a reading that began before the GPU was lost proves it to be back: %v", got)
	}
}

// TestHeldBackIsOver: of a GPU that works again and is held back, nobody is told that it does not answer.
func TestHeldBackIsOver(t *testing.T) {
	s := newTimedJudge()
	isOver := func() bool {
		shown := s.conditions(&s.reaction)
		expect.Len(t, shown, 1)
		return shown[0].Over
	}
	for range 2 {
		fails(gpu.ErrLost)(s)
		well()(s)
	}
	expect.Equal(t, isOver(), true, "it is over")
	fails(gpu.ErrLost)(s)
	expect.Equal(t, isOver(), false, "it is over when it comes again")
}

func TestUnmonitored(t *testing.T) {
	s := newTimedJudge()
	look := func(err error) string {
		s.now = s.now.Add(time.Second)
		s.read(pciA, reading{Began: s.now, Ended: s.now, Unmonitored: err})
		s.settle(pciA, time.Minute, s.now)
		var all []string
		for _, c := range s.conditions(&s.reaction) {
			all = append(all, short(c)+": "+c.Message)
		}
		return strings.Join(all, "; ")
	}
	if got, want := look(fmt.Errorf("the driver has no nvmlEventSetCreate: %w", gpu.ErrNotSupported)),
		"unmonitored None: its errors are not reported: the driver has no nvmlEventSetCreate: not supported"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, err := range []error{nil, gpu.ErrLost, gpu.ErrResetRequired} {
		if got := look(err); got != "" {
			t.Errorf("%v: %s", err, got)
		}
	}
	if got := look(errors.New("no")); got == "" {
		t.Error("nothing is said about it")
	}
}
