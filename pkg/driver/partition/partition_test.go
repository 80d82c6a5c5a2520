// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/must"
)

var (
	oneAt4   = Address{PCIAddress: pci, ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1}}
	mediaAt4 = Address{PCIAddress: pci, ProfileID: 20, Placement: gpu.Placement{Start: 4, Size: 1}}
	errBoom  = errors.New("boom")

	mine      = instance(7, oneAt4, "MIG-a")
	neighbour = instance(3, address(14, 0, 2), "MIG-n")
)

// instance makes a live instance at an address; uuid "" leaves it without a
// compute instance.
func instance(id int, a Address, uuids ...string) gpu.Instance {
	i := gpu.Instance{ID: id, ProfileID: a.ProfileID, Placement: a.Placement}
	for n, uuid := range uuids {
		i.Compute = append(i.Compute, gpu.ComputeInstance{ID: n, UUID: uuid})
	}
	return i
}

func address(profile uint32, start, size int) Address {
	return Address{PCIAddress: pci, ProfileID: profile, Placement: gpu.Placement{Start: start, Size: size}}
}

// lifecycle has a clock on which no time passes: the n-th wait runs onWait, and
// the waits end after limit of them as a deadline would end them.
func lifecycle(f *fakeGPU, limit int, onWait func(n int)) *Lifecycle {
	l := New(f, f)
	n := 0
	l.wait = func(ctx context.Context, _ time.Duration) error {
		if n++; n > limit {
			return context.DeadlineExceeded
		}
		if onWait != nil {
			onWait(n)
		}
		return ctx.Err()
	}
	return l
}

// outcome is what every case of every table checks.
type outcome struct {
	is       error  // the error wraps this; nil: no error
	says     string // the error contains this
	calls    string // separated by commas
	left     []gpu.Instance
	modeLeft bool
}

func (want outcome) check(t *testing.T, f *fakeGPU, err error) {
	t.Helper()
	fails := want.is != nil || want.says != ""
	if (err != nil) != fails || want.is != nil && !errors.Is(err, want.is) || err != nil && !strings.Contains(err.Error(), want.says) {
		t.Errorf("error %v, want one that wraps %v and says %q", err, want.is, want.says)
	}
	if diff := cmp.Diff(want.calls, strings.Join(f.calls, ", ")); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want.left, f.instances, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("instances left (-want +got):\n%s", diff)
	}
	if f.enabled != want.modeLeft {
		t.Errorf("MIG mode left on: %t, want %t", f.enabled, want.modeLeft)
	}
}

// off is a GPU whose MIG mode is off, and with one with the mode on and these instances.
func off() *fakeGPU { return &fakeGPU{faults: map[string][]fault{}} }
func with(instances ...gpu.Instance) *fakeGPU {
	return &fakeGPU{enabled: true, instances: instances, faults: map[string][]fault{}}
}
func all(instances ...gpu.Instance) []gpu.Instance { return instances }

// failing adds faults of a call.
func (f *fakeGPU) failing(call string, faults ...fault) *fakeGPU {
	f.faults[call] = faults
	return f
}

func (f *fakeGPU) used(processes ...gpu.Process) *fakeGPU {
	f.processes = processes
	return f
}

func TestMake(t *testing.T) {
	needsReset, engines := off(), with(instance(5, address(20, 0, 1), "MIG-m"))
	needsReset.resetMode, engines.media = true, 20
	overlapping, sameProfile := instance(5, address(9, 4, 4), "MIG-f"), instance(5, mediaAt4)
	divided, made := instance(5, oneAt4, "MIG-a", "MIG-b"), instance(7, oneAt4, "MIG-4-1")
	holder := gpu.Process{PID: 4711, InstanceID: -1}
	refused := fault{err: gpu.ErrInUse}
	const modeOn, undone = "mode true, gi+ 19@4:1, ci+ 7", "mode true, mode false"
	for name, test := range map[string]struct {
		gpu    *fakeGPU
		at     Address
		static bool
		made   bool
		outcome
	}{
		"mode is turned on": {off(), oneAt4, false, true, outcome{calls: modeOn, left: all(made), modeLeft: true}},
		"mode is on already": {
			with(neighbour), oneAt4, true, true, outcome{calls: "gi+ 19@4:1, ci+ 7", left: all(neighbour, made), modeLeft: true}},
		"mode off and static":                       {off(), oneAt4, true, false, outcome{is: gpu.ErrNotSupported, says: pci}},
		"mode needs a reset, nothing stays pending": {needsReset, oneAt4, false, false, outcome{is: gpu.ErrResetRequired, calls: undone}},
		"mode refused, holder is named": {
			off().used(holder).failing("SetMIGMode", refused), oneAt4, false, false, outcome{is: gpu.ErrInUse, says: "4711", calls: undone}},
		"mode reports success and does nothing": {
			off().failing("SetMIGMode", fault{}), oneAt4, false, false, outcome{says: "has not changed", calls: undone}},
		"another instance overlaps": {with(overlapping), oneAt4, false, false, outcome{
			is: gpu.ErrNoRoom, says: "GPU instance 5 (profile 9, placement 4:4)", calls: "gi+ 19@4:1", left: all(overlapping), modeLeft: true}},
		"another profile at the same placement": {with(sameProfile), oneAt4, false, false, outcome{
			is: gpu.ErrNoRoom, says: "GPU instance 5 (profile 20, placement 4:1)", calls: "gi+ 19@4:1", left: all(sameProfile), modeLeft: true}},
		"divided into compute instances by someone else": {with(divided), oneAt4, false, false, outcome{
			is: ErrForeign, says: "GPU instance 5 is there already", left: all(divided), modeLeft: true}},
		"media engines are taken": {engines, mediaAt4, false, false, outcome{
			is: gpu.ErrNoRoom, says: "GPU instance 5 (profile 20, placement 0:1)", calls: "gi+ 20@4:1", left: engines.instances, modeLeft: true}},
		"GPU instance fails": {off().failing("CreateInstance", fault{err: errBoom}), oneAt4, false, false, outcome{
			is: errBoom, calls: "mode true, gi+ 19@4:1", modeLeft: true}},
		"GPU instance is made and reports failure": {
			off().failing("CreateInstance", fault{err: errBoom, after: true}), oneAt4, false, false, outcome{
				is: errBoom, calls: "mode true, gi+ 19@4:1, gi- 7", modeLeft: true}},
		"compute instance fails": {with(neighbour).failing("CreateComputeInstance", fault{err: errBoom}), oneAt4, false, false, outcome{
			is: errBoom, says: "GPU instance 7", calls: "gi+ 19@4:1, ci+ 7", left: all(neighbour, instance(7, oneAt4)), modeLeft: true}},
		"compute instance is made and reports failure": {
			off().failing("CreateComputeInstance", fault{err: errBoom, after: true}), oneAt4, false, false, outcome{
				is: errBoom, calls: modeOn, left: all(made), modeLeft: true}},
		"state cannot be read": {off().failing("MIGState", fault{err: gpu.ErrLost}), oneAt4, false, false, outcome{is: gpu.ErrLost}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := lifecycle(test.gpu, 99, nil).Make(t.Context(), test.at, !test.static)
			test.check(t, test.gpu, err)
			var want gpu.PartitionID
			if test.made {
				want = gpu.PartitionID{InstanceID: 7, UUID: "MIG-4-1"}
			}
			if got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// TestSomebodyElseMakes: what others have at the address, or make there meanwhile, stays.
func TestSomebodyElseMakes(t *testing.T) {
	theirs := instance(9, oneAt4, "MIG-x")
	comes := func(f *fakeGPU) { f.instances = all(theirs) }
	for name, test := range map[string]struct {
		gpu *fakeGPU
		outcome
	}{
		"before": {with(theirs), outcome{is: ErrForeign, says: "profile 19 at 4:1 on GPU " + pci}},
		"while MIG mode is turned on": {
			off().failing("SetMIGMode", fault{after: true, then: comes}), outcome{is: gpu.ErrNoRoom, calls: "mode true, gi+ 19@4:1"}},
		"before the GPU instance": {
			with().failing("CreateInstance", fault{err: gpu.ErrNoRoom, then: comes}), outcome{is: gpu.ErrNoRoom, calls: "gi+ 19@4:1"}},
		"in place of the GPU instance": {
			with().failing("CreateComputeInstance", fault{err: gpu.ErrNotFound, then: comes}), outcome{is: gpu.ErrNotFound, calls: "gi+ 19@4:1, ci+ 7"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := lifecycle(test.gpu, 99, nil).Make(t.Context(), oneAt4, true)
			test.left, test.modeLeft = all(theirs), true
			test.check(t, test.gpu, err)
		})
	}
}

func TestLookup(t *testing.T) {
	f := &fakeGPU{enabled: true, instances: []gpu.Instance{
		instance(7, oneAt4, "MIG-a"), instance(8, address(19, 5, 1)), instance(9, address(14, 0, 2), "MIG-b", "MIG-c"),
	}}
	state := must.Get(New(f, f).State(t.Context(), pci))(t)
	tests := map[string]struct {
		at    Address
		want  gpu.PartitionID
		found bool
	}{
		"there":                      {at: oneAt4, want: gpu.PartitionID{InstanceID: 7, UUID: "MIG-a"}, found: true},
		"other profile at its place": {at: mediaAt4},
		"nothing there":              {at: address(19, 6, 1)},
		"no compute instance":        {at: address(19, 5, 1)},
		"divided":                    {at: address(14, 0, 2)},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got, found := Lookup(state, test.at); got != test.want || found != test.found {
				t.Errorf("got %+v %t, want %+v %t", got, found, test.want, test.found)
			}
		})
	}
	if len(f.calls) > 0 {
		t.Errorf("looking has changed something: %v", f.calls)
	}
}

// What is only asked names the GPU when it fails.
func TestReadingFails(t *testing.T) {
	f := off().failing("MIGState", fault{err: gpu.ErrLost})
	if _, err := New(f, f).State(t.Context(), pci); !errors.Is(err, gpu.ErrLost) || !strings.Contains(err.Error(), pci) {
		t.Errorf("state: got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := New(f, f).Processes(ctx, pci); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), pci) {
		t.Errorf("processes: got %v", err)
	}
	f.processes = []gpu.Process{{PID: 4711, InstanceID: 7}}
	if got, err := New(f, f).Processes(t.Context(), pci); err != nil || len(got) != 1 || got[0].PID != 4711 {
		t.Errorf("processes: got %v, %v", got, err)
	}
}

// The address is written to disk; its form must stay.
func TestAddressJSON(t *testing.T) {
	data := must.Get(json.Marshal(oneAt4))(t)
	const want = `{"pciAddress":"0000:1b:00.0","profileID":19,"placement":{"start":4,"size":1}}`
	if string(data) != want {
		t.Errorf("got %s, want %s", data, want)
	}
	var back Address
	if err := json.Unmarshal(data, &back); err != nil || back != oneAt4 {
		t.Errorf("read back %+v, %v", back, err)
	}
}
