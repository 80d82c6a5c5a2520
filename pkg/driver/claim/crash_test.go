// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// The tests here find out by themselves which effects a call has, so that a new
// one is covered without anyone remembering it.

// layout is what is broken at every point: claims that are operated on at the
// same time. Other claims and foreign partitions are there before, and must not
// notice.
type layout struct {
	beside  []string
	foreign []partition.Address
	claims  [][]string
	// config is for the claims, not for the one beside.
	config string
	// large is for claims with a share that is larger than the one beside.
	large bool
}

var layouts = map[string]layout{
	"whole":                 {claims: [][]string{{wholeA}}},
	"whole without MIG":     {claims: [][]string{{wholeC}}},
	"partition with mode":   {claims: [][]string{{sliceA0}}},
	"second on the GPU":     {beside: []string{halfA4}, claims: [][]string{{sliceA0}}},
	"several on two GPUs":   {claims: [][]string{{sliceA0, sliceA4, sliceB0, wholeC}}},
	"beside, on two GPUs":   {beside: []string{halfA4, sliceB0}, claims: [][]string{{sliceA0, wholeC}}},
	"whole beside another":  {beside: []string{wholeA}, claims: [][]string{{wholeB}}},
	"two on one GPU":        {claims: [][]string{{sliceA0}, {sliceA4}}},
	"two beside another":    {beside: []string{sliceA1}, claims: [][]string{{sliceA0, sliceB0}, {halfA4}}},
	"MPS share":             {claims: [][]string{{wholeA + "-mps"}}},
	"second MPS share":      {beside: []string{wholeA + "-mps"}, claims: [][]string{{wholeA + "-mps"}}},
	"larger MPS share":      {beside: []string{mpsA}, claims: [][]string{{mpsA}}, large: true},
	"two MPS shares":        {claims: [][]string{{wholeA + "-mps"}, {wholeA + "-mps"}}},
	"MPS of a partition":    {beside: []string{halfA4}, claims: [][]string{{sliceA0 + "-mps"}}},
	"second of a partition": {beside: []string{sliceA0 + "-mps"}, claims: [][]string{{sliceA0 + "-mps"}}},
	"time slice":            {claims: [][]string{{wholeC + "-timeslice"}}},
	"second time slice":     {beside: []string{wholeA + "-timeslice"}, claims: [][]string{{wholeA + "-timeslice"}}},
	"turns on a partition":  {claims: [][]string{{sliceA0 + "-timeslice"}, {sliceA0 + "-timeslice"}}},
	"MPS of its own":        {beside: []string{wholeC + "-mps"}, claims: [][]string{{wholeA, wholeB}}, config: ownMPS},
	"interval of its own": {claims: [][]string{{wholeA}}, config: `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig",
		"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`},
	"MPS on its own partition": {beside: []string{halfA4}, claims: [][]string{{sliceA0}},
		config: strings.ReplaceAll(strings.ReplaceAll(ownMPS, "GpuConfig", "MigDeviceConfig"), `{"1":"5Gi"}`, `{"0":"5Gi"}`)},
	"many kinds":      {claims: [][]string{{wholeA + "-mps", sliceB0 + "-mps", wholeC + "-timeslice"}}},
	"static":          {foreign: []partition.Address{addressA0}, claims: [][]string{{staticA0}}},
	"static and made": {foreign: []partition.Address{addressA0}, claims: [][]string{{staticA0, sliceA4}}},
}

// claim i of a layout has the UID u<i>.
func (l layout) newClaims() []*resourceapi.ResourceClaim {
	var claims []*resourceapi.ResourceClaim
	for i, devices := range l.claims {
		claim := newClaim(fmt.Sprintf("u%d", i), devices...)
		if l.large {
			claim = portion(string(claim.UID), devices[0], "30Gi", "50")
		}
		if l.config != "" {
			configure(claim, resourceapi.AllocationConfigSourceClaim, l.config)
		}
		claims = append(claims, claim)
	}
	return claims
}

// boxWith returns a machine with the claims that are beside.
func boxWith(t *testing.T, l layout) (*box, []string) {
	t.Helper()
	b := newBox(t)
	for _, at := range l.foreign {
		b.makeForeign(at)
	}
	if len(l.beside) > 0 {
		mustPrepare(t, b.manager(), newClaim("beside", l.beside...))
	}
	return b, b.state()
}

// wantState fails unless exactly this is there.
func (b *box) wantState(t *testing.T, when string, want []string) {
	t.Helper()
	if got := b.state(); !slices.Equal(got, want) {
		t.Errorf("%s: left\n%q, want\n%q", when, got, want)
	}
}

// wantStateButMode is for a preparation that has failed: MIG mode may stay on until a whole GPU is wanted.
func (b *box) wantStateButMode(t *testing.T, when string, want []string) {
	t.Helper()
	got := slices.DeleteFunc(b.state(), func(s string) bool { return strings.HasPrefix(s, "MIG mode of ") && !slices.Contains(want, s) })
	if !slices.Equal(got, want) {
		t.Errorf("%s: left\n%q, want\n%q", when, got, want)
	}
}

// strike sets a hook before or after each effect.
func (b *box) strike(after bool, hook func(effect string) error) {
	if after {
		b.hooks(nil, hook)
	} else {
		b.hooks(hook, nil)
	}
}

// at makes a hook that acts on the nth effect.
func at(n int, act func() error) func(string) error {
	var mu sync.Mutex
	count := 0
	return func(string) error {
		mu.Lock()
		count++
		now := count == n
		mu.Unlock()
		if now {
			return act()
		}
		return nil
	}
}

// operation is what is broken.
type operation struct {
	prepared bool // the claims are prepared before
	undoes   bool // it is a release
	run      func(ctx context.Context, m *Manager, claim *resourceapi.ResourceClaim) error
}

func runPrepare(ctx context.Context, m *Manager, claim *resourceapi.ResourceClaim) error {
	_, err := m.Prepare(ctx, claim)
	return err
}

var operations = map[string]operation{
	"prepare": {false, false, runPrepare},
	"unprepare": {true, true, func(ctx context.Context, m *Manager, claim *resourceapi.ResourceClaim) error {
		return m.Unprepare(ctx, claim.UID)
	}},
	"prepare again": {true, false, runPrepare},
}

// all runs an operation on all claims at the same time.
func (op operation) all(ctx context.Context, m *Manager, claims []*resourceapi.ResourceClaim) error {
	errs := make([]error, len(claims))
	var wg sync.WaitGroup
	for i, claim := range claims {
		wg.Go(func() { errs[i] = op.run(ctx, m, claim) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// continuations are what comes after a plugin was killed. Each ends without the
// claims.
var continuations = map[string]func(t *testing.T, b *box, claims []*resourceapi.ResourceClaim){
	"prepare": func(t *testing.T, b *box, claims []*resourceapi.ResourceClaim) {
		for _, claim := range claims {
			mustPrepare(t, b.manager(), claim)
		}
		for _, claim := range claims {
			mustUnprepare(t, b.manager(), claim.UID)
		}
	},
	"unprepare": func(t *testing.T, b *box, claims []*resourceapi.ResourceClaim) {
		for _, claim := range claims {
			mustUnprepare(t, b.bareManager(), claim.UID)
		}
	},
	"reconcile, then prepare": func(t *testing.T, b *box, claims []*resourceapi.ResourceClaim) {
		m := b.manager()
		mustReconcile(t, m)
		for _, claim := range claims {
			mustPrepare(t, m, claim)
			mustUnprepare(t, m, claim.UID)
		}
	},
	"reconcile, then unprepare": func(t *testing.T, b *box, claims []*resourceapi.ResourceClaim) {
		m := b.manager()
		mustReconcile(t, m)
		for _, claim := range claims {
			mustUnprepare(t, m, claim.UID)
		}
	},
	"reconcile, the claims were deleted meanwhile": func(t *testing.T, b *box, claims []*resourceapi.ResourceClaim) {
		for _, claim := range claims {
			b.deleteClaim(claim.UID)
		}
		m := b.manager()
		mustReconcile(t, m)
		b.pass(DefaultOrphanGrace)
		mustReconcile(t, m)
	},
	afterReboot: func(t *testing.T, b *box, claims []*resourceapi.ResourceClaim) {
		mustPrepare(t, b.manager(), newClaim("beside-2", sliceA1))
		mustUnprepare(t, b.manager(), "beside-2")
		for _, claim := range claims {
			mustPrepare(t, b.manager(), claim)
		}
		for _, claim := range claims {
			mustUnprepare(t, b.manager(), claim.UID)
		}
		mustUnprepare(t, b.manager(), "beside")
	},
}

const afterReboot = "reboot, then prepare"

// TestKilled kills the plugin before and after every effect of every operation
// on every layout, and continues in every way.
//
// Without PARTAGE_TEST_ALL it continues in one of six ways, which differs between layouts and operations: the model of the
// rules knows all orders.
func TestKilled(t *testing.T) {
	cases := 0
	all, least := os.Getenv("PARTAGE_TEST_ALL") != "", 680
	if all {
		least = 4080
	}
	for i, layoutName := range slices.Sorted(maps.Keys(layouts)) {
		l := layouts[layoutName]
		for j, operationName := range slices.Sorted(maps.Keys(operations)) {
			op := operations[operationName]
			for k, continuation := range slices.Sorted(maps.Keys(continuations)) {
				for _, after := range []bool{false, true} {
					if !all && (i+j+k)%len(continuations) > 0 {
						continue
					}
					for n := 1; ; n++ {
						when := fmt.Sprintf("%s, %s killed at effect %d (after: %v), then %s", layoutName, operationName, n, after, continuation)
						if !killOnce(t, l, op, n, after, continuation, when) {
							break
						}
						cases++
						if t.Failed() {
							return
						}
					}
				}
			}
		}
	}
	wantCases(t, cases, least)
}

// wantCases fails a test whose enumeration has shrunk: it would show nothing any more.
func wantCases(t *testing.T, cases, least int) {
	t.Helper()
	t.Logf("%d cases", cases)
	if cases < least {
		t.Errorf("only %d cases, want at least %d", cases, least)
	}
}

// killOnce tells whether there was an nth effect to kill the plugin at.
func killOnce(t *testing.T, l layout, op operation, n int, after bool, continuation, when string) bool {
	b, want := boxWith(t, l)
	claims := l.newClaims()
	if op.prepared {
		for _, claim := range claims {
			mustPrepare(t, b.manager(), claim)
		}
	}
	m := b.manager()
	b.strike(after, at(n, b.die))
	if err := op.all(t.Context(), m, claims); err != nil && !b.killed() {
		t.Errorf("%s: %v", when, err)
	}
	seen := b.seen()
	defer func() {
		if t.Failed() {
			t.Logf("%s: effects before it was killed: %q", when, seen)
		}
	}()
	b.hooks(nil, nil)
	if !b.killed() {
		return false
	}
	if continuation == afterReboot {
		b.boot("boot-2")
		want = b.hardware()
	}
	continuations[continuation](t, b, claims)
	b.wantState(t, when, want)
	return true
}

// A plugin is killed while it prepares a claim whose record was damaged.
// The next one ends up with all of the claim, and no file that cannot be read.
func TestKilledWithDamagedRecord(t *testing.T) {
	cases := 0
	for _, after := range []bool{false, true} {
		for n := 1; ; n++ {
			b, want := boxWith(t, layout{beside: []string{halfA4}})
			claim := newClaim("u1", sliceA0, sliceB0)
			m := b.manager()
			mustPrepare(t, m, claim)
			write(t, m.store.Path("u1"), "{")
			b.strike(after, at(n, b.die))
			_ = runPrepare(t.Context(), m, claim)
			b.hooks(nil, nil)
			if !b.killed() {
				break
			}
			cases++
			mustPrepare(t, b.manager(), claim)
			mustUnprepare(t, b.manager(), claim.UID)
			b.wantState(t, fmt.Sprintf("killed at effect %d (after: %v)", n, after), want)
		}
	}
	wantCases(t, cases, 10)
}

// TestFault makes every effect of every operation fail once: instead of
// happening, or after it has happened.
func TestFault(t *testing.T) {
	cases := 0
	for layoutName, l := range layouts {
		if len(l.claims) > 1 {
			continue // the other claim would not fail
		}
		for operationName, op := range operations {
			for _, after := range []bool{false, true} {
				for n := 1; ; n++ {
					when := fmt.Sprintf("%s, %s fails at effect %d (after: %v)", layoutName, operationName, n, after)
					if !failOnce(t, l, op, n, after, when) {
						break
					}
					cases++
					if t.Failed() {
						t.Fatal(when)
					}
				}
			}
		}
	}
	wantCases(t, cases, 470)
}

// failOnce tells whether there was an nth effect to fail.
func failOnce(t *testing.T, l layout, op operation, n int, after bool, when string) bool {
	b, want := boxWith(t, l)
	claim := l.newClaims()[0]
	if op.prepared {
		mustPrepare(t, b.manager(), claim)
	}
	prepared := b.state()
	struck := ""
	strike := at(n, func() error { return errFault })
	fail := func(effect string) error {
		err := strike(effect)
		if err != nil {
			struck = effect
		}
		return err
	}
	m := b.manager()
	b.strike(after, fail)
	err := op.run(t.Context(), m, claim)
	b.hooks(nil, nil)
	if struck == "" {
		return false
	}
	switch {
	case (struck == "write prepared" || struck == "mark prepared") && after:
		// It is written down that all of it is there.
		wantPrepared(t, b, claim.UID, when, err)
	case struck == "mode off":
		// That MIG mode stays on is not a failure. The next claim turns it off.
		mustPrepare(t, m, claim)
	case op.undoes && struck == "set limits":
		// Limits that cannot be tightened keep no claim. They follow with the next round.
		mustReconcile(t, m)
	case op.undoes:
		// Once it is written down that the claim is released the rest may follow later.
	case after && slices.Contains([]string{"mode on", "destroy instance", "destroy compute instance"}, struck):
		// What a driver says does not matter where what was wanted is there.
	case err == nil:
		t.Errorf("%s: no error", when)
	}
	switch {
	case !op.prepared && err != nil:
		b.wantStateButMode(t, when, want)
	case op.prepared && !op.undoes:
		b.wantState(t, when, prepared) // its containers may be running
	}
	// Once the fault is gone, all is well without a new process.
	if err := op.run(t.Context(), m, claim); err != nil {
		t.Errorf("%s: once it is gone: %v", when, err)
	}
	mustUnprepare(t, m, claim.UID)
	b.wantState(t, when, want)
	return true
}

// wantPrepared fails unless a claim is prepared completely.
func wantPrepared(t *testing.T, b *box, uid types.UID, when string, err error) {
	t.Helper()
	r, readErr := b.store().Read(uid)
	if err != nil || readErr != nil || r == nil || r.State != record.Prepared || len(b.spec(uid)) != len(r.Devices) {
		t.Errorf("%s: %v, and it is written down as %+v, %v", when, err, r, readErr)
	}
}

// TestFaultPersists: an effect fails and so does everything after it, undoing
// included. Reconcile cleans up later.
func TestFaultPersists(t *testing.T) {
	cases := 0
	for layoutName, l := range layouts {
		if len(l.claims) > 1 {
			continue
		}
		for n := 1; ; n++ {
			b, want := boxWith(t, l)
			claim := l.newClaims()[0]
			var count atomic.Int32 // groups are made at the same time
			m := b.manager()
			b.hooks(func(string) error {
				if count.Add(1) >= int32(n) {
					return errFault
				}
				return nil
			}, nil)
			_, err := m.Prepare(t.Context(), claim)
			b.hooks(nil, nil)
			if err == nil {
				break
			}
			cases++
			when := fmt.Sprintf("%s, everything fails from effect %d on", layoutName, n)
			mustReconcile(t, m)
			b.wantStateButMode(t, when, want)
			mustPrepare(t, m, claim)
			mustUnprepare(t, m, claim.UID)
			b.wantState(t, when, want)
			if t.Failed() {
				t.Fatal(when)
			}
		}
	}
	wantCases(t, cases, 101)
}

// doAt makes a hook that does something at each effect of this name.
func doAt(effect string, do func()) func(string) error {
	return func(e string) error {
		if e == effect {
			do()
		}
		return nil
	}
}

// losses are what somebody else removes of the partition at addressA0.
var losses = map[string]func(b *box){
	"all of it": func(b *box) { b.removeForeign(addressA0) },
	"compute instance": func(b *box) {
		b.change(addressA0, func(i *gpu.Instance) {
			delete(b.exclusive, i.Compute[0].UUID)
			i.Compute = nil
		})
	},
}

// A partition is made again, and its session is started again. Wherever the call stops, the next release leaves nothing.
func TestStoppedWhileMadeAgain(t *testing.T) {
	for lossName, lose := range losses {
		for name, test := range map[string]struct {
			device string
			stop   func(b *box)
		}{
			"killed": {sliceA0, func(b *box) { b.hooks(nil, b.killAt("create compute instance")) }},
			"killed in the second attempt": {sliceA0, func(b *box) {
				// The first one cannot write down what it is about to do.
				b.hooks(failTimes("write prepared", 1, gpu.ErrTimeout), b.killAt("create compute instance"))
			}},
			"no session": {mpsSliceA0, func(b *box) { b.hooks(failTimes("start session", 1, errFault), nil) }},
			"panic": {mpsSliceA0, func(b *box) {
				b.hooks(func(effect string) error {
					if effect == "start session" {
						panic("a defect")
					}
					return nil
				}, nil)
			}},
		} {
			runInBubble(t, name+", "+lossName, func(t *testing.T) {
				b := newBox(t)
				claim := newClaim("u1", test.device)
				m := b.manager()
				mustPrepare(t, m, claim)
				lose(b)
				b.locked(func() { delete(b.sessions, sliceA0) })
				test.stop(b)
				wantStopped(t, m, claim)
				b.hooks(nil, nil)
				mustUnprepare(t, b.manager(), "u1")
				b.wantNothing()
			})
		}
	}
}

// TestKilledWhileMadeAgainForHalfAClaim: a process is killed while it prepares a claim on two GPUs and has written down what it has made
// on one. The same holds for the next one, which goes on with the claim.
func TestKilledWhileMadeAgainForHalfAClaim(t *testing.T) {
	for name, lose := range losses {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("beside", sliceB0))
			claim := newClaim("u1", sliceA0, sliceB0)
			done := goPrepare(t, m, claim)
			synctest.Wait() // for the second GPU
			b.hooks(nil, b.killAt("mark preparing"))
			mustUnprepare(t, b.manager(), "beside")
			expect.Is(t, <-done, errKilled)
			b.hooks(nil, nil)
			m = b.manager()
			live, _ := b.look(addressA0)
			r, err := m.store.Read("u1")
			if err != nil || r == nil || r.State != record.Preparing || r.Devices[0].Mark != record.Started || live.UUID == "" {
				t.Fatalf("got %+v, %v", r, err)
			}

			lose(b)
			b.hooks(nil, func(string) error {
				if _, found := b.look(addressA0); found {
					return b.die()
				}
				return nil
			})
			expect.Is(t, runPrepare(t.Context(), m, claim), errKilled)
			b.hooks(nil, nil)
			b.endAll(b.manager(), "u1")
		})
	}
}

// wantStopped prepares a claim, which fails or panics.
func wantStopped(t *testing.T, m *Manager, claim *resourceapi.ResourceClaim) {
	t.Helper()
	defer func() { _ = recover() }()
	if err := runPrepare(t.Context(), m, claim); err == nil {
		t.Error("it was not stopped")
	}
}

// powerLosses are what a power loss may leave of a file of which the disk was not waited for.
var powerLosses = map[string]func(path string, was []byte) error{
	"lost":      func(path string, _ []byte) error { return os.Remove(path) },
	"empty":     func(path string, _ []byte) error { return os.WriteFile(path, nil, 0o600) },
	"zeros":     func(path string, was []byte) error { return os.WriteFile(path, make([]byte, len(was)), 0o600) },
	"half":      func(path string, was []byte) error { return os.WriteFile(path, was[:len(was)/2], 0o600) },
	"untouched": func(path string, was []byte) error { return os.WriteFile(path, was, 0o600) },
	"as it was before": func(path string, was []byte) error {
		return os.WriteFile(path, []byte(rehead(string(was), "state=prepared ", "state=preparing")), 0o600)
	},
	"not finished": func(path string, was []byte) error {
		temporary := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
		return errors.Join(os.Remove(path), os.WriteFile(temporary, was[:len(was)/2], 0o600))
	},
}

// No record waits for the disk. Whatever a power loss leaves of it, nothing is
// left of claims, none is in the way of another, and all can be prepared again.
func TestPowerLoss(t *testing.T) {
	cases := 0
	for layoutName, l := range layouts {
		for lossName, lose := range powerLosses {
			t.Run(layoutName+"/"+lossName, func(t *testing.T) {
				b, _ := boxWith(t, l)
				claims := l.newClaims()
				for _, claim := range claims {
					mustPrepare(t, b.manager(), claim)
				}
				uids := []types.UID{"beside"}
				for _, claim := range claims {
					uids = append(uids, claim.UID)
				}
				for _, uid := range uids {
					spoil(t, b.store().Path(uid), lose)
				}
				b.boot("boot-2")
				want := b.hardware()

				m := b.manager()
				mustReconcile(t, m)
				for _, claim := range claims {
					mustPrepare(t, m, claim)
				}
				for _, uid := range uids {
					mustUnprepare(t, m, uid)
				}
				b.wantState(t, "released", want)
				if snapshot := m.store.Snapshot(); len(snapshot.Guards) > 0 {
					t.Errorf("damaged records count in the next boot: %+v", snapshot.Guards)
				}
				cases++
			})
		}
	}
	wantCases(t, cases, len(layouts)*len(powerLosses))
}

// spoil changes a file that may not be there.
func spoil(t *testing.T, path string, lose func(path string, was []byte) error) {
	t.Helper()
	was, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		err = lose(path, was)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A release needs no space on the disk, whatever kind of claim it is.
func TestReleaseOnFullDisk(t *testing.T) {
	cases := 0
	for name, l := range layouts {
		t.Run(name, func(t *testing.T) {
			b, want := boxWith(t, l)
			claims := l.newClaims()
			for _, claim := range claims {
				mustPrepare(t, b.manager(), claim)
			}
			m := b.manager()
			b.hooks(fullDisk, nil)
			for _, claim := range claims {
				mustUnprepare(t, m, claim.UID)
			}
			b.wantState(t, "released", want)
			// A call that is late is refused all the same.
			if _, err := m.Prepare(arrivedAt(t.Context(), -1), claims[0]); err == nil {
				t.Error("a call from before the release was let through")
			}
			b.hooks(nil, nil)
			cases++
		})
	}
	if cases < 20 {
		t.Errorf("%d cases", cases)
	}
}

// A release waits for no call of the claim that hangs in another process, and comes to its end on a full disk.
func TestReleaseWhileClaimIsHeldElsewhere(t *testing.T) {
	for name, hook := range map[string]func(string) error{"disk": nil, "full disk": fullDisk} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
			giveBack, err := b.manager().locks.TryClaim("u1")
			if err != nil || giveBack == nil {
				t.Fatalf("the claim is not free: %v", err)
			}
			b.hooks(hook, nil)
			began := time.Now()
			mustUnprepare(t, m, "u1")
			wantWithin(t, began, 0)
			b.wantNothing()
			b.hooks(nil, nil)
			giveBack()
			mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
			b.endAll(m, "u1")
		})
	}
}

// fullDisk is a hook before effects.
func fullDisk(effect string) error {
	if strings.HasPrefix(effect, "write ") {
		return &os.PathError{Op: "write", Path: "journal", Err: unix.ENOSPC}
	}
	return nil
}

// A tenant cannot fill the disk that the journal is on through what its container can
// write to.
func TestTenantCannotFillTheJournal(t *testing.T) {
	b := newBox(t)
	must.Do(t, os.MkdirAll(b.dataDir(), 0o750))
	if err := unix.Mount("disk", b.dataDir(), "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(b.dataDir(), unix.MNT_DETACH) })
	m := b.manager()
	m.engine.Specs.Unmount = host.RemoveTmpfs
	m.engine.Specs.Mount = func(path string, bytes int64) error { return host.MountTmpfs("partage", path, bytes, "") }
	mustPrepare(t, m, newClaim("attacker", turnsC))
	for _, d := range b.spec("attacker") {
		for _, mount := range d.Mounts {
			if !mount.ReadOnly {
				fill(t, filepath.Join(mount.HostPath, "fill"))
			}
		}
	}
	mustPrepare(t, m, newClaim("other", sliceB0))
	b.endAll(m, "other", "attacker")
	if entries, err := os.ReadDir(filepath.Join(b.dataDir(), "limits")); err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

// fill writes until there is no space.
func fill(t *testing.T, path string) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	for total := 0; err == nil; total += 4096 {
		if _, err = file.Write(make([]byte, 4096)); total > 1<<30 {
			t.Fatal("a gigabyte fits")
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v", err)
	}
}

// TestNotWrittenAfterReboot: a claim whose record is of an earlier boot, and cannot be written anew, has no CDI spec.
func TestNotWrittenAfterReboot(t *testing.T) {
	b := newBox(t)
	mustPrepare(t, b.manager(), newClaim("u1", wholeC))
	b.boot("boot-2")
	m := b.manager()
	b.hooks(failTimes("write prepared", 1, errFault), nil)
	expect.Is(t, runPrepare(t.Context(), m, newClaim("u1", wholeC)), errFault)
	if spec := b.spec("u1"); len(spec) > 0 {
		t.Errorf("there is a CDI spec: %v", spec)
	}
	mustPrepare(t, m, newClaim("u1", wholeC))
	b.endAll(m, "u1")
}

// A disk is full, and a GPU is in use: the release is written down all the same, and comes to its end after a restart.
func TestPendingReleaseOnFullDisk(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
	b.occupy(addressB0)
	b.hooks(fullDisk, nil)
	mustUnprepare(t, m, "u1")
	b.hooks(nil, nil)
	b.run(pciB)
	mustReconcile(t, b.manager())
	b.wantNothing()
}

// TestDropThatWasNotWritten: of a claim with two groups the first is undone, and the disk is full when that is to be written down.
// Another claim with a share of the same partition is released meanwhile, and leaves the partition to the record that is still there,
// which is removed without a look when the second group is undone.
func TestDropThatWasNotWritten(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newShare("u2", mpsSliceA0, map[resourceapi.QualifiedName]string{"smPercent": "10"}))
		var failing atomic.Bool // the groups of a claim are prepared side by side
		b.hooks(func(e string) error {
			switch {
			case e == "set limits":
				failing.Store(true)
				return errFault
			case failing.Load() && strings.HasPrefix(e, "write preparing"):
				return unix.ENOSPC
			}
			return nil
		}, nil)
		goOn := make(chan struct{})
		b.beforeEffect(func(address, _ string) error {
			if address == pciB {
				<-goOn
				return errFault
			}
			return nil
		})
		done := goPrepare(t, m, newClaim("u1", mpsSliceA0, sliceB0))
		synctest.Wait()
		b.pass(time.Second)
		mustUnprepare(t, m, "u2")
		close(goOn)
		t.Log(<-done)
		b.beforeEffect(nil)
		b.hooks(nil, nil)
		mustUnprepare(t, m, "u1")
		mustReconcile(t, m)
		b.wantNothing()
		if s := survey(t.Context(), m); len(s.Static) > 0 {
			t.Errorf("published as somebody else's: %+v", s.Static)
		}
	})
}
