// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"errors"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
)

var busy = []gpu.Process{{PID: 42, InstanceID: 7}, {PID: 41, InstanceID: 7}, {PID: 5, InstanceID: 3}}

// stillInUse outlasts all attempts.
var stillInUse = []fault{
	{err: gpu.ErrInUse}, {err: gpu.ErrInUse}, {err: gpu.ErrInUse}, {err: gpu.ErrInUse},
	{err: gpu.ErrInUse}, {err: gpu.ErrInUse}, {err: gpu.ErrInUse}, {err: gpu.ErrInUse},
}

var removeTests = map[string]struct {
	gpu     fakeGPU
	dynamic bool
	waits   int // how many the deadline allows
	freeAt  int // the wait after which all processes are gone
	onFree  func(*fakeGPU)
	outcome
}{
	"last one, mode follows": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{mine}}, dynamic: true,
		outcome: outcome{calls: []string{"ci- 7/0", "gi- 7", "mode false"}},
	},
	"last one, static": {
		gpu:     fakeGPU{enabled: true, instances: []gpu.Instance{mine}},
		outcome: outcome{calls: []string{"ci- 7/0", "gi- 7"}, modeLeft: true},
	},
	"neighbour stays": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{neighbour, mine}}, dynamic: true,
		outcome: outcome{calls: []string{"ci- 7/0", "gi- 7"}, left: []gpu.Instance{neighbour}, modeLeft: true},
	},
	"absent": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{neighbour}}, dynamic: true,
		outcome: outcome{left: []gpu.Instance{neighbour}, modeLeft: true},
	},
	"absent, interrupted before the mode": {
		gpu: fakeGPU{enabled: true}, dynamic: true,
		outcome: outcome{calls: []string{"mode false"}},
	},
	"absent, mode off": {gpu: fakeGPU{}, dynamic: true},
	"no MIG any more":  {gpu: fakeGPU{notMIG: true}, dynamic: true, outcome: outcome{is: gpu.ErrNotSupported}},
	"another profile at the placement is not ours": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{instance(7, mediaAt4, "MIG-f")}}, dynamic: true,
		outcome: outcome{left: []gpu.Instance{instance(7, mediaAt4, "MIG-f")}, modeLeft: true},
	},
	"without compute instance": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{instance(7, oneAt4)}}, dynamic: true,
		outcome: outcome{calls: []string{"gi- 7", "mode false"}},
	},
	"divided by someone else": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{instance(7, oneAt4, "MIG-f", "MIG-g")}}, dynamic: true,
		outcome: outcome{left: []gpu.Instance{instance(7, oneAt4, "MIG-f", "MIG-g")}, modeLeft: true},
	},
	"compute instance vanishes meanwhile": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{mine},
			faults: map[string][]fault{"DestroyComputeInstance": {{err: gpu.ErrNotFound, after: true}}},
		},
		outcome: outcome{calls: []string{"ci- 7/0", "gi- 7"}, modeLeft: true},
	},
	"GPU instance goes and reports failure": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{mine},
			faults: map[string][]fault{"DestroyInstance": {{err: errBoom, after: true}}},
		}, dynamic: true,
		outcome: outcome{calls: []string{"ci- 7/0", "gi- 7", "mode false"}},
	},
	"GPU instance stays": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{instance(7, oneAt4)},
			faults: map[string][]fault{"DestroyInstance": {{err: errBoom}}},
		}, dynamic: true,
		outcome: outcome{
			is: errBoom, says: []string{"profile 19 at 4:1"}, calls: []string{"gi- 7"},
			left: []gpu.Instance{instance(7, oneAt4)}, modeLeft: true,
		},
	},
	"GPU is lost": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{instance(7, oneAt4)},
			faults: map[string][]fault{"DestroyInstance": {{err: gpu.ErrLost}}},
		}, dynamic: true,
		outcome: outcome{
			is: gpu.ErrLost, calls: []string{"gi- 7"},
			left: []gpu.Instance{instance(7, oneAt4)}, modeLeft: true,
		},
	},
	"a process holds it and goes": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{mine}, processes: busy[:1]}, dynamic: true,
		waits: 99, freeAt: 2,
		outcome: outcome{calls: []string{"ci- 7/0", "ci- 7/0", "ci- 7/0", "gi- 7", "mode false"}},
	},
	"a process holds it to the end": {
		gpu: fakeGPU{enabled: true, instances: []gpu.Instance{mine}, processes: busy}, dynamic: true,
		waits: 1,
		outcome: outcome{
			is: gpu.ErrInUse, says: []string{"process 41, process 42", "compute instance 0 of GPU instance 7", pci},
			calls: []string{"ci- 7/0", "ci- 7/0"},
			left:  []gpu.Instance{mine}, modeLeft: true,
		},
	},
	"an agent holds the GPU instance to the end": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{instance(7, oneAt4)},
			faults: map[string][]fault{"DestroyInstance": stillInUse},
		},
		waits: 99,
		outcome: outcome{
			is: gpu.ErrInUse, says: []string{"GPU instance 7", "held by nobody"},
			calls: []string{"gi- 7", "gi- 7", "gi- 7", "gi- 7", "gi- 7", "gi- 7", "gi- 7", "gi- 7"},
			left:  []gpu.Instance{instance(7, oneAt4)}, modeLeft: true,
		},
	},
	"an agent removes it while we wait": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{instance(7, oneAt4)},
			faults: map[string][]fault{"DestroyInstance": {{err: gpu.ErrInUse}}},
		},
		waits: 99, freeAt: 1, onFree: func(f *fakeGPU) { f.instances = nil },
		outcome: outcome{calls: []string{"gi- 7"}, modeLeft: true},
	},
	"mode stays on, that is no failure": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{instance(7, oneAt4)},
			faults: map[string][]fault{"SetMIGMode": {{err: gpu.ErrInUse}}},
		}, dynamic: true,
		outcome: outcome{calls: []string{"gi- 7", "mode false", "mode true"}, modeLeft: true},
	},
	"mode change does not return": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{instance(7, oneAt4)},
			faults: map[string][]fault{"SetMIGMode": {{err: &gpu.PendingError{Call: "nvmlDeviceSetMigMode", PCIAddress: pci}}}},
		}, dynamic: true,
		outcome: outcome{is: gpu.ErrHung, calls: []string{"gi- 7", "mode false"}, modeLeft: true},
	},
	"state cannot be read": {
		gpu: fakeGPU{
			enabled: true, instances: []gpu.Instance{mine},
			faults: map[string][]fault{"MIGState": {{err: gpu.ErrLost}}},
		},
		outcome: outcome{is: gpu.ErrLost, left: []gpu.Instance{mine}, modeLeft: true},
	},
}

func TestRemove(t *testing.T) {
	for name, test := range removeTests {
		t.Run(name, func(t *testing.T) {
			f := test.gpu.clone()
			l := lifecycle(f, test.waits, func(n int) {
				if n != test.freeAt {
					return
				}
				f.processes = nil
				if test.onFree != nil {
					test.onFree(f)
				}
			})
			test.check(t, f, l.Remove(t.Context(), oneAt4, test.dynamic))
		})
	}
}

// A change of the mode that is refused has had no effect, and one that may be pending is taken back.
func TestSetMode(t *testing.T) {
	for name, test := range map[string]struct {
		gpu fakeGPU
		on  bool
		outcome
		refused bool
	}{
		"on":  {on: true, outcome: outcome{calls: []string{"mode true"}, modeLeft: true}},
		"off": {gpu: fakeGPU{enabled: true}, outcome: outcome{calls: []string{"mode false"}}},
		"held": {
			gpu: fakeGPU{
				enabled: true, processes: []gpu.Process{{PID: 4711, InstanceID: -1}}, faults: map[string][]fault{"SetMIGMode": {{err: gpu.ErrInUse}}},
			},
			outcome: outcome{is: gpu.ErrInUse, says: []string{"process 4711", "off"}, calls: []string{"mode false", "mode true"}, modeLeft: true}, refused: true,
		},
		"reports success and stays off": {
			gpu: fakeGPU{faults: map[string][]fault{"SetMIGMode": {{}}}}, on: true,
			outcome: outcome{says: []string{"has not changed", pci}, calls: []string{"mode true", "mode false"}}, refused: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := test.gpu.clone()
			err := New(f, f).SetMode(t.Context(), pci, test.on)
			test.check(t, f, err)
			if refused := (*RefusedError)(nil); errors.As(err, &refused) != test.refused {
				t.Errorf("got %T %v", err, err)
			}
		})
	}
}

// To callers that know nothing of division, a divided GPU is one in use.
func TestDividedIsInUse(t *testing.T) {
	if !errors.Is(ErrDivided, gpu.ErrInUse) {
		t.Error("it is not")
	}
}

// Make and Remove repeat without a trace.
func TestRepeat(t *testing.T) {
	f := &fakeGPU{}
	l := New(f, f)
	for range 3 {
		if _, err := l.Make(t.Context(), oneAt4, true); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := l.Remove(t.Context(), oneAt4, true); err != nil {
				t.Fatal(err)
			}
		}
		if f.enabled || len(f.instances) > 0 {
			t.Fatalf("left behind: mode %t, %v", f.enabled, f.instances)
		}
	}
}
