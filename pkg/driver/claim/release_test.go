// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// Two processes find the last two shares of a GPU orphaned at the same time. As long as a process runs on it nobody else gets it,
// whether or not each of them has seen the other one's first.
func TestLastSharesOrphanedInTwoProcesses(t *testing.T) {
	for range 20 {
		b, one, two := newPair(t)
		mustPrepare(t, one, newClaim("u1", turnsC))
		mustPrepare(t, two, newClaim("u2", turnsC))
		b.run(pciC, gpu.Process{PID: 4711, InstanceID: -1})
		var wg sync.WaitGroup
		for uid, m := range map[types.UID]*Manager{"u1": one, "u2": two} {
			wg.Go(func() {
				r, err := m.store.Read(uid)
				if err != nil || r == nil {
					t.Error(err)
					return
				}
				_ = m.orphans.release(t.Context(), r, r.Arrived+1)
			})
		}
		wg.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // it is asked once
		wantError(t, runPrepare(ctx, one, newClaim("u3", wholeC)), "")
		b.run(pciC)
		b.deleteClaim("u1")
		b.deleteClaim("u2")
		mustReconcile(t, one)
		b.pass(DefaultOrphanGrace)
		mustReconcile(t, one)
		b.wantNothing()
	}
}

// TestReleaseOfGuardUnwritten: something may be left of a claim whose record cannot be read and whose GPU does not answer. Where
// its release cannot be written down either, nobody is told that it is over.
func TestReleaseOfGuardUnwritten(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", sliceA0))
		damage(t, m, "u1")
		_, comeBack := b.hang(pciA)
		b.hooks(fullDisk, nil)
		wantError(t, m.Unprepare(t.Context(), "u1"), "may be left")
		b.hooks(nil, nil)
		comeBack()
		synctest.Wait()
		m = b.manager()
		mustUnprepare(t, m, "u1")
		b.removeForeign(addressA0) // as the guard says
		mustReconcile(t, m)
		b.wantGuards(0)
	})
}

// unprepareWithoutGPU releases u1 while somebody has the lock of its GPU, for which the release has no time.
func unprepareWithoutGPU(ctx context.Context, t *testing.T, m *Manager) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	expect.Is(t, m.Unprepare(ctx, "u1"), nil)
}

// TestReleaseOfEarlierPodWhileSpecIsWritten: the spec that a younger call writes stays, also where the disk says that the call's last write
// has failed, and it has not.
func TestReleaseOfEarlierPodWhileSpecIsWritten(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	earlier := arrivedAt(t.Context(), b.clock())
	release := sync.OnceFunc(func() { unprepareWithoutGPU(earlier, t, m) })
	b.hooks(doAt("write spec", release), failTimes("mark prepared", 1, errFault))
	mustPrepare(t, m, newClaim("u1", sliceA0))
	if b.spec("u1") == nil {
		t.Errorf("the claim is prepared and has no spec: %q", b.seen())
	}
}

// Pods end, whatever keeps the hardware from being released. The place stays tainted, the CDI spec goes, and the rest follows later.
func TestPodsEnd(t *testing.T) {
	for name, test := range map[string]struct {
		err    error
		effect string
		device string
	}{
		"in use":            {gpu.ErrInUse, "destroy instance", sliceA0},
		"no permission":     {gpu.ErrNoPermission, "destroy instance", sliceA0},
		"version mismatch":  {gpu.ErrVersionMismatch, "destroy instance", sliceA0},
		"driver not loaded": {gpu.ErrDriverNotLoaded, "destroy instance", sliceA0},
		"GPU lost":          {gpu.ErrLost, "destroy instance", sliceA0},
		"GPU not there":     {gpu.ErrNotFound, "destroy instance", sliceA0},
		"GPU to be reset":   {gpu.ErrResetRequired, "destroy instance", sliceA0},
		"any other":         {errors.New("internal error 7"), "destroy instance", sliceA0},
		"program too slow":  {context.DeadlineExceeded, "interval Default", turnsA},
		"no program":        {fmt.Errorf("no nvidia-smi: %w", fs.ErrNotExist), "interval Default", turnsC},
	} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", test.device))
			b.hooks(failTimes(test.effect, always, test.err), nil)
			mustUnprepare(t, m, "u1")
			b.wantNoSpec("u1")
			if got := findings(survey(t.Context(), m)); len(got) != 1 || !strings.HasPrefix(got[0], string(device.ReleasePending)) {
				t.Errorf("the place is not tainted: %v", got)
			}
			err := m.cleanUp(t.Context())
			wantError(t, err, "claim default/claim-u1")
			expect.Is(t, err, test.err)
			mustUnprepare(t, m, "u1")
			b.hooks(nil, nil)
			mustReconcile(t, b.manager())
			b.wantNothing()
		})
	}
}

// One of two partitions on a GPU is in use: the other one is given back.
func TestUnprepareGoesOn(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0, sliceA4))
	b.occupy(addressA4)
	mustUnprepare(t, m, "u1")
	expect.Same(t, b.count(pciA), 1) // nobody uses the other one
	b.wantAt(addressA4, true, "it is in use")
}

// A release that cannot even begin with a GPU succeeds. In another boot, in which nothing tells of that call any more, its record is still
// one of a claim that is to be released.
func TestUnprepareOfBusyGPUThenReboot(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", sliceA0))
		release := b.lockGPU(b.manager(), pciA)
		mustUnprepare(t, m, "u1")
		release()
		b.boot("boot-2")
		mustReconcile(t, b.manager())
		b.wantRecord("u1", "")
	})
}

// TestClearFailsOnce: that the last write of a release fails once leaves nothing, and is in nobody's way.
func TestClearFailsOnce(t *testing.T) {
	for name, next := range map[string]func(t *testing.T, m *Manager){
		"released":       func(*testing.T, *Manager) {},
		"allocated anew": func(t *testing.T, m *Manager) { mustPrepare(t, m, newClaim("u1", sliceA0)) },
		"the place given to the next": func(t *testing.T, m *Manager) {
			mustUnprepare(t, m, "u1")
			mustPrepare(t, m, newClaim("u2", sliceB0))
		},
	} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", sliceB0))
			b.hooks(failTimes("delete record", 1, os.ErrDeadlineExceeded), nil)
			began := time.Now()
			next(t, m)
			b.endAll(m, "u1", "u2")
			wantWithin(t, began, 0)
			if !slices.Contains(b.seen(), "delete record") {
				t.Error("nothing failed")
			}
		})
	}
}

// TestReleasedWhileSpecIsWritten: whatever reconciliation was about to write of a claim is gone when its release has returned, also where
// the record cannot be read any more, so that no round looks after the claim.
func TestReleasedWhileSpecIsWritten(t *testing.T) {
	for _, test := range []struct{ elsewhere, damaged bool }{{false, false}, {false, true}, {true, false}, {true, true}} {
		t.Run(fmt.Sprintf("%+v", test), func(t *testing.T) {
			b, m := newNode(t)
			mustPrepare(t, m, newClaim("u1", sliceA0))
			b.specs["u1"] = nil // the driver was upgraded
			releaser := m
			if test.elsewhere {
				releaser = b.manager()
			}
			b.hooks(doAt("write spec", sync.OnceFunc(func() {
				if test.damaged {
					damage(t, m, "u1")
				}
				unprepareWithoutGPU(t.Context(), t, releaser)
			})), nil)
			_ = m.cleanUp(t.Context())
			b.hooks(nil, nil)
			if left, found := b.specs["u1"]; found {
				t.Errorf("the spec is there again: %v", left)
			}
		})
	}
}

func TestStalePrepare(t *testing.T) {
	const outOfDate = "out of date"
	for name, test := range map[string]struct {
		arrived time.Duration // of Prepare; the claim is released at 20
		boot    string        // in between
		known   bool          // the claim was prepared
		refused bool
	}{
		"before":                  {arrived: 10, known: true, refused: true},
		"before, of unknown":      {arrived: 10, refused: true},
		"later":                   {arrived: 30, known: true},
		"before, in another boot": {arrived: 10, boot: "boot-2", known: true},
	} {
		t.Run(name, func(t *testing.T) {
			b, old, m := newPair(t)
			if test.known {
				mustPrepare(t, old, newClaim("u1", sliceA0))
			}
			must.Do(t, old.Unprepare(arrivedAt(t.Context(), 20), "u1"))
			// A release that was on its way for longer does not turn time back.
			must.Do(t, old.Unprepare(arrivedAt(t.Context(), 15), "u1"))
			if test.boot != "" {
				b.boot(test.boot)
				m = b.manager()
			}
			// The other process knows it as well.
			_, err := m.Prepare(arrivedAt(t.Context(), test.arrived), newClaim("u1", sliceA0))
			if test.refused {
				wantError(t, err, outOfDate)
				b.wantNothing()
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			// The older call may still be on its way.
			if test.boot == "" && !m.store.Released("u1", 15) {
				t.Error("nobody knows of the release any more")
			}
		})
	}
}

// A Prepare that waits for the release of its claim may be older than that, and
// one that comes while the claim is being released is not.
func TestPrepareWaitsBehindUnprepare(t *testing.T) {
	for at, refused := range map[time.Duration]bool{10: true, 21: false} {
		onNode(t, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", sliceA0))
			leave := make(chan struct{})
			b.hooks(doAt("destroy instance", func() { <-leave }), nil)
			released, prepared := make(chan error), make(chan error)
			go func() { released <- m.Unprepare(arrivedAt(t.Context(), 20), "u1") }()
			synctest.Wait()
			go func() {
				_, err := m.Prepare(arrivedAt(t.Context(), at), newClaim("u1", sliceA0))
				prepared <- err
			}()
			synctest.Wait()
			close(leave)
			expect.Is(t, <-released, nil)
			if err := <-prepared; (err != nil) != refused {
				t.Errorf("arrived at %d: got %v", at, err)
			}
			b.pass(time.Second)
			b.endAll(m, "u1")
		})
	}
}

// Without a stamp, a call arrives when it is made.
func TestArrivalWithoutStamp(t *testing.T) {
	b, m := newNode(t)
	b.pass(time.Hour)
	mustUnprepare(t, m, "u1")
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustUnprepare(t, m, "u1")
	b.pass(-time.Minute)
	wantError(t, runPrepare(t.Context(), m, newClaim("u1", sliceA0)), "out of date")

	before := host.SinceBoot()
	if at, stamped := Arrived(t.Context()).Value(arrivalKey{}).(time.Duration); !stamped || at < before || at > host.SinceBoot() || before == 0 {
		t.Errorf("arrived at %s (%v), now is %s", at, stamped, before)
	}
}

// TestReleaseWithoutOthers: no file says when a claim was released where no other process could have an older call.
func TestReleaseWithoutOthers(t *testing.T) {
	b, m := newNode(t)
	b.pass(time.Hour)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustUnprepare(t, m, "u1")
	expect.Same(t, recordFiles(t, b), 0)
	b.pass(-time.Minute)
	wantError(t, runPrepare(t.Context(), m, newClaim("u1", sliceA0)), "out of date")
}

// recordFiles is how many files of claims there are.
func recordFiles(t *testing.T, b *box) int {
	t.Helper()
	entries := must.Get(os.ReadDir(filepath.Join(b.dataDir(), "records")))(t)
	return len(entries)
}

// observing lets something happen while a GPU is observed.
type observing struct {
	users converge.Users
	then  func()
}

func (o observing) Users(ctx context.Context, pciAddress string, claims []*record.Record, orphan *record.Record) (string, map[int]string, string) {
	o.then()
	return o.users.Users(ctx, pciAddress, claims, orphan)
}

// TestReleasedByAnotherProcess: a claim that another process releases at any time while it is prepared has nothing in the end.
func TestReleasedByAnotherProcess(t *testing.T) {
	for _, nth := range []int{1, 2} {
		synctest.Test(t, func(t *testing.T) {
			b := newBox(t)
			other, seen := b.manager(), 0
			m := b.managerWith(func(o *Options) {
				o.Users = observing{o.Users, func() {
					if seen++; seen == nth {
						expect.Is(t, other.Unprepare(arrivedAt(t.Context(), 20), "u1"), nil)
					}
				}}
			})
			b.hooks(failTimes("write spec", 1, gpu.ErrUnknown), nil)
			wantError(t, runPrepare(arrivedAt(t.Context(), 10), m, newClaim("u1", wholeC)), "out of date")
			b.wantNothing()
		})
	}
}

// TestStaleCallAfterYounger: another process has released the claim and prepared it anew since. An older call is refused, and
// does not touch what the younger one has, also where something of that is to be made again.
func TestStaleCallAfterYounger(t *testing.T) {
	for name, test := range map[string]struct {
		claim func() *resourceapi.ResourceClaim
		// lose says that the CDI spec is gone.
		lose bool
	}{
		"complete":     {func() *resourceapi.ResourceClaim { return newClaim("u1", sliceA0) }, false},
		"spec missing": {func() *resourceapi.ResourceClaim { return newClaim("u1", sliceA0) }, true},
		"interval":     {func() *resourceapi.ResourceClaim { return configure(newClaim("u1", wholeC), fromClaim, gpuLong) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			b, old, m := newPair(t)
			must.Do(t, m.Unprepare(arrivedAt(t.Context(), 20), "u1"))
			must.Do(t, runPrepare(arrivedAt(t.Context(), 30), m, test.claim()))
			if test.lose {
				b.locked(func() { delete(b.specs, "u1") })
			}
			before := b.state()
			wantError(t, runPrepare(arrivedAt(t.Context(), 10), old, test.claim()), "out of date")
			b.wantState(t, "after the late call", before)
			if r, err := m.store.Read("u1"); err != nil || r == nil || r.State != record.Prepared || r.Arrived != 30 {
				t.Errorf("the younger call's record is %+v, %v", r, err)
			}
		})
	}
}

// TestStaleCallWaits: a call that waits for a place ends when its claim is released in another process.
func TestStaleCallWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, old, m := newPair(t)
		mustPrepare(t, m, newClaim("other", sliceA0))
		began, done := time.Now(), make(chan error)
		go func() {
			_, err := old.Prepare(arrivedAt(t.Context(), 10), newClaim("u1", sliceA0))
			done <- err
		}()
		synctest.Wait()
		expect.Is(t, m.Unprepare(arrivedAt(t.Context(), 20), "u1"), nil)
		if err := <-done; err == nil || !strings.Contains(err.Error(), "out of date") || time.Since(began) > 2*time.Second {
			t.Errorf("the late call ends after %s: %v", time.Since(began), err)
		}
	})
}

// TestReconcileBesideRelease: a release that has just come is no news, whichever process is at work on it.
func TestReconcileBesideRelease(t *testing.T) {
	for name, same := range map[string]bool{"the same": true, "the other": false} {
		b, old, m := newPair(t)
		if same {
			m = old
		}
		mustPrepare(t, old, newClaim("u1", sliceA0))
		b.pass(time.Hour)
		must.Get(old.store.Release("u1", b.clock()))(t)
		if status, err := m.Reconcile(t.Context()); len(status.Conditions) > 0 || err != nil {
			t.Errorf("%s process: %+v, %v", name, status.Conditions, err)
		}
	}
}

// TestLateRelease: a release that has arrived before the last Prepare of the claim, and gets its turn only then, is of an
// earlier pod.
func TestLateRelease(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	late := arrivedAt(t.Context(), b.clock())
	b.pass(time.Second)
	mustPrepare(t, m, newClaim("u1", sliceA0)) // for the next pod
	err := m.Unprepare(late, "u1")
	if b.spec("u1") == nil || b.count(pciA) == 0 {
		t.Errorf("a release from before the last Prepare took the claim's devices away: %v", err)
	}
	b.endAll(m, "u1")
}

// TestPrepareFromBeforeSuspend: a machine is suspended while a Prepare waits for the API server, and its claim was released
// before. Whatever the kubelet has given up long ago does not prepare anything.
func TestPrepareFromBeforeSuspend(t *testing.T) {
	b, m, other := newPair(t)
	defer runtime.KeepAlive(other) // it might have an older call
	mustPrepare(t, m, newClaim("u1", sliceA0))
	late := arrivedAt(t.Context(), b.clock())
	mustUnprepare(t, m, "u1")
	mustReconcile(t, m)
	expect.Same(t, recordFiles(t, b), 1)
	b.pass(time.Hour)
	mustReconcile(t, m)
	expect.Same(t, recordFiles(t, b), 0)
	wantError(t, runPrepare(late, m, newClaim("u1", sliceA0)), "out of date")
	b.wantNothing()
}

// TestOldRoundBesideYoungerRecord: a round writes the spec of a prepared claim again. Before it says so the record is damaged, and
// the claim, which was allocated anew, is being prepared on another GPU, in the same process or in another one. What the
// round has seen is not true of the younger record.
func TestOldRoundBesideYoungerRecord(t *testing.T) {
	for name, same := range map[string]bool{"the same process": true, "another process": false} {
		t.Run(name, func(t *testing.T) {
			b, m, next := newPair(t)
			if same {
				next = m
			}
			mustPrepare(t, m, newClaim("u1", sliceA0))
			b.locked(func() { b.specs["u1"] = nil }) // as after an upgrade of NVIDIA's driver
			b.pass(time.Second)
			var once sync.Once
			creates, goOn := make(chan struct{}), make(chan struct{})
			var prepared <-chan error
			b.hooks(func(e string) error {
				switch e {
				case "write spec":
					once.Do(func() {
						write(t, m.store.Path("u1"), "{")
						prepared = goPrepare(t, next, newClaim("u1", sliceB0))
						<-creates
					})
				case "create instance":
					close(creates)
					<-goOn
				}
				return nil
			}, nil)
			t.Log(m.cleanUpGPU(t.Context(), pciA))
			if r, err := m.store.Read("u1"); err != nil || r.State != record.Preparing || r.Devices[0].Device != sliceB0 {
				t.Errorf("while the partition is being made: %+v, %v", r, err)
			}
			close(goOn)
			expect.Is(t, <-prepared, nil)
			if got := b.spec("u1"); len(got) != 1 || got[0].Name != sliceB0 {
				t.Errorf("the spec is %+v", got)
			}
		})
	}
}

// During an upgrade two processes work in the same folder, and either may get any
// call.
func TestTwoProcesses(t *testing.T) {
	b := newBox(t)
	old := b.manager()
	mustPrepare(t, old, newClaim("u1", sliceA0, wholeC))
	mustPrepare(t, old, newClaim("u2", sliceB0))
	want := b.state()
	next := b.manager()
	b.hooks(nil, nil)
	for _, m := range []*Manager{next, old} {
		mustReconcile(t, m)
		if prepared := mustPrepare(t, m, newClaim("u1", sliceA0, wholeC)); len(prepared) != 2 {
			t.Errorf("got %+v", prepared)
		}
		wantFindings(t, m)
	}
	b.wantWithoutEffects()
	b.wantState(t, "both have looked", want)
	mustUnprepare(t, next, "u1")
	mustPrepare(t, old, newClaim("u3", halfA0))
	mustUnprepare(t, old, "u2")
	mustUnprepare(t, next, "u3")

	// Both reconcile the same leftovers at once, while claims come and go.
	for i, device := range []string{sliceA0, sliceA4, sliceB0} {
		b.kill(t, "create compute instance", "dead"+string(rune('0'+i)), device)
	}
	old, next = b.manager(), b.manager()
	var wg sync.WaitGroup
	for _, m := range []*Manager{old, next} {
		wg.Go(func() {
			for range 5 {
				expect.Is(t, m.cleanUp(t.Context()), nil)
			}
		})
		wg.Go(func() {
			for range 5 {
				expect.Is(t, runPrepare(t.Context(), m, newClaim("u4", sliceA0)), nil)
			}
		})
	}
	wg.Wait()
	mustUnprepare(t, next, "u4")
	mustReconcile(t, old)
	b.wantNothing()
}
