// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/must"
)

var busy = []gpu.Process{{PID: 42, InstanceID: 7}, {PID: 41, InstanceID: 7}, {PID: 5, InstanceID: 3}}

func TestRemove(t *testing.T) {
	bare, media, divided := instance(7, oneAt4), instance(7, mediaAt4, "MIG-f"), instance(7, oneAt4, "MIG-f", "MIG-g")
	noMIG := off()
	noMIG.notMIG = true
	inUse := fault{err: gpu.ErrInUse}
	const whole = "ci- 7/0, gi- 7"
	for name, test := range map[string]struct {
		gpu    *fakeGPU
		waits  int // how many the deadline allows
		freeAt int // the wait after which all processes are gone
		outcome
	}{
		"last one":         {gpu: with(mine), outcome: outcome{calls: whole}},
		"neighbour stays":  {gpu: with(neighbour, mine), outcome: outcome{calls: whole, left: all(neighbour)}},
		"absent":           {gpu: with(neighbour), outcome: outcome{left: all(neighbour)}},
		"absent, mode off": {gpu: off()},
		"no MIG any more":  {gpu: noMIG, outcome: outcome{is: gpu.ErrNotSupported}},
		"another profile at the placement is not ours": {gpu: with(media), outcome: outcome{left: all(media)}},
		"without compute instance":                     {gpu: with(bare), outcome: outcome{calls: "gi- 7"}},
		"divided by someone else":                      {gpu: with(divided), outcome: outcome{left: all(divided)}},
		"compute instance vanishes meanwhile": {
			gpu: with(mine).failing("DestroyComputeInstance", fault{err: gpu.ErrNotFound, after: true}), outcome: outcome{calls: whole}},
		"GPU instance goes and reports failure": {
			gpu: with(mine).failing("DestroyInstance", fault{err: errBoom, after: true}), outcome: outcome{calls: whole}},
		"GPU instance stays": {
			gpu: with(bare).failing("DestroyInstance", fault{err: errBoom}), outcome: outcome{is: errBoom, says: "profile 19 at 4:1", calls: "gi- 7", left: all(bare)}},
		"GPU is lost": {
			gpu: with(bare).failing("DestroyInstance", fault{err: gpu.ErrLost}), outcome: outcome{is: gpu.ErrLost, calls: "gi- 7", left: all(bare)}},
		"a process holds it and goes": {
			gpu: with(mine).used(busy[0]), waits: 99, freeAt: 2, outcome: outcome{calls: "ci- 7/0, ci- 7/0, " + whole}},
		"a process holds it to the end": {gpu: with(mine).used(busy...), waits: 1, outcome: outcome{
			is: gpu.ErrInUse, says: "process 41, process 42", calls: "ci- 7/0, ci- 7/0", left: all(mine)}},
		"an agent holds the GPU instance to the end": {
			gpu: with(bare).failing("DestroyInstance", slices.Repeat([]fault{inUse}, 8)...), waits: 99, outcome: outcome{
				is: gpu.ErrInUse, says: "held by nobody", calls: "gi- 7" + strings.Repeat(", gi- 7", 7), left: all(bare)}},
		"an agent removes it while we wait": {
			gpu: with(bare).failing("DestroyInstance", fault{err: gpu.ErrInUse, then: func(f *fakeGPU) { f.instances = nil }}), waits: 99,
			outcome: outcome{calls: "gi- 7"}},
		"state cannot be read": {
			gpu: with(mine).failing("MIGState", fault{err: gpu.ErrLost}), outcome: outcome{is: gpu.ErrLost, left: all(mine)}},
	} {
		t.Run(name, func(t *testing.T) {
			test.modeLeft = test.gpu.enabled
			l := lifecycle(test.gpu, test.waits, func(n int) {
				if n == test.freeAt {
					test.gpu.processes = nil
				}
			})
			test.check(t, test.gpu, l.Remove(t.Context(), oneAt4))
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
		must.Get(l.Make(t.Context(), oneAt4, true))(t)
		for range 2 {
			if err := l.Remove(t.Context(), oneAt4); err != nil {
				t.Fatal(err)
			}
		}
		if len(f.instances) > 0 {
			t.Fatalf("left behind: %v", f.instances)
		}
	}
}
