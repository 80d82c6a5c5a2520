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
	is       error    // the error wraps this; nil: no error
	says     []string // the error contains all of these
	calls    []string
	left     []gpu.Instance
	modeLeft bool
}

func (want outcome) check(t *testing.T, f *fakeGPU, err error) {
	t.Helper()
	fails := want.is != nil || len(want.says) > 0
	if (err != nil) != fails || (want.is != nil && !errors.Is(err, want.is)) {
		t.Errorf("error %v, want one that wraps %v and says %q", err, want.is, want.says)
	}
	for _, part := range want.says {
		if err != nil && !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not say %q", err, part)
		}
	}
	if diff := cmp.Diff(want.calls, f.calls, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want.left, f.instances, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("instances left (-want +got):\n%s", diff)
	}
	if f.enabled != want.modeLeft {
		t.Errorf("MIG mode left on: %t, want %t", f.enabled, want.modeLeft)
	}
}

var makeTests = map[string]struct {
	gpu     fakeGPU
	at      Address
	dynamic bool
	want    Live
	outcome
}{
	"mode is turned on": {
		gpu: fakeGPU{}, at: oneAt4, dynamic: true,
		want: Live{InstanceID: 7, ComputeID: 0, UUID: "MIG-4-1"},
		outcome: outcome{
			calls: []string{"mode true", "gi+ 19@4:1", "ci+ 7"},
			left:  []gpu.Instance{instance(7, oneAt4, "MIG-4-1")}, modeLeft: true,
		},
	},
	"mode is on already": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{neighbour}}, at: oneAt4,
		want: Live{InstanceID: 7, ComputeID: 0, UUID: "MIG-4-1"},
		outcome: outcome{
			calls: []string{"gi+ 19@4:1", "ci+ 7"},
			left:  []gpu.Instance{neighbour, instance(7, oneAt4, "MIG-4-1")}, modeLeft: true,
		},
	},
	"mode off and static": {
		gpu: fakeGPU{}, at: oneAt4,
		outcome: outcome{is: gpu.ErrNotSupported, says: []string{pci, "MIG mode is off"}},
	},
	"mode needs a reset, nothing stays pending": {
		gpu: fakeGPU{resetMode: true}, at: oneAt4, dynamic: true,
		outcome: outcome{is: gpu.ErrResetRequired, calls: []string{"mode true", "mode false"}},
	},
	"mode refused, holder is named": {
		gpu: fakeGPU{
			processes: []gpu.Process{{PID: 4711, InstanceID: -1}}, faults: map[string][]fault{"SetMIGMode": {{err: gpu.ErrInUse}}},
		}, at: oneAt4, dynamic: true,
		outcome: outcome{is: gpu.ErrInUse, says: []string{"4711"}, calls: []string{"mode true", "mode false"}},
	},
	"mode reports success and does nothing": {
		gpu: fakeGPU{faults: map[string][]fault{"SetMIGMode": {{}}}}, at: oneAt4, dynamic: true,
		outcome: outcome{says: []string{"has not changed"}, calls: []string{"mode true", "mode false"}},
	},
	"another instance overlaps": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{instance(5, address(9, 4, 4), "MIG-f")}}, at: oneAt4, dynamic: true,
		outcome: outcome{
			is: gpu.ErrNoRoom, says: []string{"GPU instance 5 (profile 9, placement 4:4)", "profile 19 at 4:1"}, calls: []string{"gi+ 19@4:1"},
			left: []gpu.Instance{instance(5, address(9, 4, 4), "MIG-f")}, modeLeft: true,
		},
	},
	"another profile at the same placement": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{instance(5, mediaAt4)}}, at: oneAt4, dynamic: true,
		outcome: outcome{
			is: gpu.ErrNoRoom, says: []string{"GPU instance 5 (profile 20, placement 4:1)"}, calls: []string{"gi+ 19@4:1"},
			left: []gpu.Instance{instance(5, mediaAt4)}, modeLeft: true,
		},
	},
	"divided into compute instances by someone else": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{instance(5, oneAt4, "MIG-a", "MIG-b")}}, at: oneAt4, dynamic: true,
		outcome: outcome{
			is: ErrForeign, says: []string{"GPU instance 5 is there already"},
			left: []gpu.Instance{instance(5, oneAt4, "MIG-a", "MIG-b")}, modeLeft: true,
		},
	},
	"media engines are taken": {
		gpu: fakeGPU{enabled: true, media: 20, instances: []gpu.Instance{instance(5, address(20, 0, 1), "MIG-m")}}, at: mediaAt4, dynamic: true,
		outcome: outcome{
			is: gpu.ErrNoRoom, says: []string{"engine", "GPU instance 5 (profile 20, placement 0:1)"},
			calls: []string{"gi+ 20@4:1"},
			left:  []gpu.Instance{instance(5, address(20, 0, 1), "MIG-m")}, modeLeft: true,
		},
	},
	"GPU instance fails": {
		gpu: fakeGPU{faults: map[string][]fault{"CreateInstance": {{err: errBoom}}}}, at: oneAt4, dynamic: true,
		outcome: outcome{is: errBoom, calls: []string{"mode true", "gi+ 19@4:1", "mode false"}},
	},
	"GPU instance is made and reports failure": {
		gpu: fakeGPU{faults: map[string][]fault{"CreateInstance": {{err: errBoom, after: true}}}}, at: oneAt4, dynamic: true,
		outcome: outcome{is: errBoom, calls: []string{"mode true", "gi+ 19@4:1", "gi- 7", "mode false"}},
	},
	"compute instance fails": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{neighbour},
			faults: map[string][]fault{"CreateComputeInstance": {{err: errBoom}}},
		}, at: oneAt4, dynamic: true,
		outcome: outcome{
			is: errBoom, says: []string{"GPU instance 7"}, calls: []string{"gi+ 19@4:1", "ci+ 7", "gi- 7"},
			left: []gpu.Instance{neighbour}, modeLeft: true,
		},
	},
	"compute instance is made and reports failure": {
		gpu: fakeGPU{faults: map[string][]fault{"CreateComputeInstance": {{err: errBoom, after: true}}}}, at: oneAt4, dynamic: true,
		outcome: outcome{is: errBoom, calls: []string{"mode true", "gi+ 19@4:1", "ci+ 7", "ci- 7/0", "gi- 7", "mode false"}},
	},
	"undoing fails, both are told": {
		gpu: fakeGPU{
			enabled: true,
			faults: map[string][]fault{
				"CreateComputeInstance": {{err: errBoom}},
				"DestroyInstance":       {{err: gpu.ErrLost}},
			},
		}, at: oneAt4,
		outcome: outcome{
			is: gpu.ErrLost, says: []string{"boom", "undo"}, calls: []string{"gi+ 19@4:1", "ci+ 7", "gi- 7"},
			left: []gpu.Instance{instance(7, oneAt4)}, modeLeft: true,
		},
	},
	"state cannot be read": {
		gpu: fakeGPU{faults: map[string][]fault{"MIGState": {{err: gpu.ErrLost}}}}, at: oneAt4, dynamic: true,
		outcome: outcome{is: gpu.ErrLost},
	},
}

func TestMake(t *testing.T) {
	for name, test := range makeTests {
		t.Run(name, func(t *testing.T) {
			f := test.gpu.clone()
			got, err := lifecycle(f, 99, nil).Make(t.Context(), test.at, test.dynamic)
			test.check(t, f, err)
			if got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

// TestSomebodyElseMakes: what others have at the address, or make there meanwhile, stays.
func TestSomebodyElseMakes(t *testing.T) {
	theirs := instance(9, oneAt4, "MIG-x")
	comes := func(f *fakeGPU) { f.instances = []gpu.Instance{theirs} }
	for name, test := range map[string]struct {
		gpu fakeGPU
		outcome
	}{
		"before": {
			gpu:     fakeGPU{enabled: true, instances: []gpu.Instance{theirs}},
			outcome: outcome{is: ErrForeign, says: []string{"GPU instance 9 is there already", "profile 19 at 4:1 on GPU " + pci}},
		},
		"while MIG mode is turned on": {
			gpu:     fakeGPU{faults: map[string][]fault{"SetMIGMode": {{after: true, then: comes}}}},
			outcome: outcome{is: gpu.ErrNoRoom, calls: []string{"mode true", "gi+ 19@4:1"}},
		},
		"before the GPU instance": {
			gpu:     fakeGPU{enabled: true, faults: map[string][]fault{"CreateInstance": {{err: gpu.ErrNoRoom, then: comes}}}},
			outcome: outcome{is: gpu.ErrNoRoom, calls: []string{"gi+ 19@4:1"}},
		},
		"in place of the GPU instance": {
			gpu:     fakeGPU{enabled: true, faults: map[string][]fault{"CreateComputeInstance": {{err: gpu.ErrNotFound, then: comes}}}},
			outcome: outcome{is: gpu.ErrNotFound, calls: []string{"gi+ 19@4:1", "ci+ 7"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := test.gpu.clone()
			_, err := lifecycle(f, 99, nil).Make(t.Context(), oneAt4, true)
			test.left, test.modeLeft = []gpu.Instance{theirs}, true
			test.check(t, f, err)
		})
	}
}

// A caller that gives up in the middle still leaves nothing behind.
func TestMakeUndoesAfterCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	f := &fakeGPU{faults: map[string][]fault{
		"CreateInstance": {{after: true, then: func(*fakeGPU) { cancel() }}},
	}}
	_, err := New(f, f).Make(ctx, oneAt4, true)
	outcome{
		is: context.Canceled, calls: []string{"mode true", "gi+ 19@4:1", "gi- 7", "mode false"},
	}.check(t, f, err)
}

func TestLookup(t *testing.T) {
	f := &fakeGPU{enabled: true, instances: []gpu.Instance{
		instance(7, oneAt4, "MIG-a"), instance(8, address(19, 5, 1)), instance(9, address(14, 0, 2), "MIG-b", "MIG-c"),
	}}
	state, err := New(f, f).State(t.Context(), pci)
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		at    Address
		want  Live
		found bool
	}{
		"there":                      {at: oneAt4, want: Live{InstanceID: 7, UUID: "MIG-a"}, found: true},
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
	f := &fakeGPU{faults: map[string][]fault{"MIGState": {{err: gpu.ErrLost}}}}
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
	data, err := json.Marshal(oneAt4)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"pciAddress":"0000:1b:00.0","profileID":19,"placement":{"start":4,"size":1}}`
	if string(data) != want {
		t.Errorf("got %s, want %s", data, want)
	}
	var back Address
	if err := json.Unmarshal(data, &back); err != nil || back != oneAt4 {
		t.Errorf("read back %+v, %v", back, err)
	}
}
