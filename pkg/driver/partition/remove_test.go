// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
)

var busy = []gpu.Process{{PID: 42, InstanceID: 7}, {PID: 41, InstanceID: 7}, {PID: 5, InstanceID: 3}}

func TestRemove(t *testing.T) {
	bare, media, divided := instance(7, oneAt4), instance(7, mediaAt4, "MIG-f"), instance(7, oneAt4, "MIG-f", "MIG-g")
	noMIG := off()
	noMIG.notMIG = true
	inUse, boom := fault{err: gpu.ErrInUse}, fault{err: errBoom}
	hangs := fault{err: &gpu.PendingError{Call: "nvmlDeviceSetMigMode", PCIAddress: pci}}
	const whole = "ci- 7/0, gi- 7"
	for name, test := range map[string]struct {
		gpu    *fakeGPU
		static bool
		waits  int // how many the deadline allows
		freeAt int // the wait after which all processes are gone
		outcome
	}{
		"last one, mode follows":              {gpu: with(mine), outcome: outcome{calls: whole + ", mode false"}},
		"last one, static":                    {gpu: with(mine), static: true, outcome: outcome{calls: whole, modeLeft: true}},
		"neighbour stays":                     {gpu: with(neighbour, mine), outcome: outcome{calls: whole, left: all(neighbour), modeLeft: true}},
		"absent":                              {gpu: with(neighbour), outcome: outcome{left: all(neighbour), modeLeft: true}},
		"absent, interrupted before the mode": {gpu: with(), outcome: outcome{calls: "mode false"}},
		"absent, mode off":                    {gpu: off()},
		"no MIG any more":                     {gpu: noMIG, outcome: outcome{is: gpu.ErrNotSupported}},
		"another profile at the placement is not ours": {gpu: with(media), outcome: outcome{left: all(media), modeLeft: true}},
		"without compute instance":                     {gpu: with(bare), outcome: outcome{calls: "gi- 7, mode false"}},
		"divided by someone else":                      {gpu: with(divided), outcome: outcome{left: all(divided), modeLeft: true}},
		"compute instance vanishes meanwhile": {
			gpu: with(mine).failing("DestroyComputeInstance", fault{err: gpu.ErrNotFound, after: true}), static: true, outcome: outcome{calls: whole, modeLeft: true}},
		"GPU instance goes and reports failure": {
			gpu: with(mine).failing("DestroyInstance", fault{err: errBoom, after: true}), outcome: outcome{calls: whole + ", mode false"}},
		"GPU instance stays": {
			gpu: with(bare).failing("DestroyInstance", boom), outcome: outcome{is: errBoom, says: "profile 19 at 4:1", calls: "gi- 7", left: all(bare), modeLeft: true}},
		"GPU is lost": {
			gpu: with(bare).failing("DestroyInstance", fault{err: gpu.ErrLost}), outcome: outcome{is: gpu.ErrLost, calls: "gi- 7", left: all(bare), modeLeft: true}},
		"a process holds it and goes": {
			gpu: with(mine).used(busy[0]), waits: 99, freeAt: 2, outcome: outcome{calls: "ci- 7/0, ci- 7/0, " + whole + ", mode false"}},
		"a process holds it to the end": {gpu: with(mine).used(busy...), waits: 1, outcome: outcome{
			is: gpu.ErrInUse, says: "process 41, process 42", calls: "ci- 7/0, ci- 7/0", left: all(mine), modeLeft: true}},
		"an agent holds the GPU instance to the end": {
			gpu: with(bare).failing("DestroyInstance", slices.Repeat([]fault{inUse}, 8)...), static: true, waits: 99, outcome: outcome{
				is: gpu.ErrInUse, says: "held by nobody", calls: "gi- 7" + strings.Repeat(", gi- 7", 7), left: all(bare), modeLeft: true}},
		"an agent removes it while we wait": {
			gpu: with(bare).failing("DestroyInstance", fault{err: gpu.ErrInUse, then: func(f *fakeGPU) { f.instances = nil }}), static: true, waits: 99,
			outcome: outcome{calls: "gi- 7", modeLeft: true}},
		"mode stays on, that is no failure": {
			gpu: with(bare).failing("SetMIGMode", inUse), outcome: outcome{calls: "gi- 7, mode false, mode true", modeLeft: true}},
		"mode change does not return": {
			gpu: with(bare).failing("SetMIGMode", hangs), outcome: outcome{is: gpu.ErrHung, calls: "gi- 7, mode false", modeLeft: true}},
		"state cannot be read": {
			gpu: with(mine).failing("MIGState", fault{err: gpu.ErrLost}), static: true, outcome: outcome{is: gpu.ErrLost, left: all(mine), modeLeft: true}},
	} {
		t.Run(name, func(t *testing.T) {
			l := lifecycle(test.gpu, test.waits, func(n int) {
				if n == test.freeAt {
					test.gpu.processes = nil
				}
			})
			test.check(t, test.gpu, l.Remove(t.Context(), oneAt4, !test.static))
		})
	}
}

// A change of the mode that is refused has had no effect, and one that may be pending is taken back.
func TestSetMode(t *testing.T) {
	held := with().used(gpu.Process{PID: 4711, InstanceID: -1}).failing("SetMIGMode", fault{err: gpu.ErrInUse})
	for name, test := range map[string]struct {
		gpu     *fakeGPU
		on      bool
		refused bool
		outcome
	}{
		"on":   {off(), true, false, outcome{calls: "mode true", modeLeft: true}},
		"off":  {with(), false, false, outcome{calls: "mode false"}},
		"held": {held, false, true, outcome{is: gpu.ErrInUse, says: "process 4711", calls: "mode false, mode true", modeLeft: true}},
		"reports success and stays off": {
			off().failing("SetMIGMode", fault{}), true, true, outcome{says: pci, calls: "mode true, mode false"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := New(test.gpu, test.gpu).SetMode(t.Context(), pci, test.on)
			test.check(t, test.gpu, err)
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
