// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
)

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
			b := newBox(t)
			old, m := b.manager(), b.manager()
			if test.known {
				mustPrepare(t, old, newClaim("u1", sliceA0))
			}
			if err := old.Unprepare(arrivedAt(t.Context(), 20), "u1"); err != nil {
				t.Fatal(err)
			}
			// A release that was on its way for longer does not turn time back.
			if err := old.Unprepare(arrivedAt(t.Context(), 15), "u1"); err != nil {
				t.Fatal(err)
			}
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
		synctest.Test(t, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", sliceA0))
			leave := make(chan struct{})
			b.hooks(func(e string) error {
				if e == "destroy instance" {
					<-leave
				}
				return nil
			}, nil)
			released, prepared := make(chan error), make(chan error)
			go func() { released <- m.Unprepare(arrivedAt(t.Context(), 20), "u1") }()
			synctest.Wait()
			go func() {
				_, err := m.Prepare(arrivedAt(t.Context(), at), newClaim("u1", sliceA0))
				prepared <- err
			}()
			synctest.Wait()
			close(leave)
			if err := <-released; err != nil {
				t.Error(err)
			}
			if err := <-prepared; (err != nil) != refused {
				t.Errorf("arrived at %d: got %v", at, err)
			}
			b.pass(time.Second)
			mustUnprepare(t, m, "u1")
			b.wantNothing()
		})
	}
}

// Without a stamp, a call arrives when it is made.
func TestArrivalWithoutStamp(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.pass(time.Hour)
	mustUnprepare(t, m, "u1")
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustUnprepare(t, m, "u1")
	b.pass(-time.Minute)
	_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
	wantError(t, err, "out of date")

	before := host.SinceBoot()
	if at, stamped := Arrived(t.Context()).Value(arrivalKey{}).(time.Duration); !stamped || at < before || at > host.SinceBoot() || before == 0 {
		t.Errorf("arrived at %s (%v), now is %s", at, stamped, before)
	}
}

// TestReleaseWithoutOthers: no file says when a claim was released where no other process could have an older call.
func TestReleaseWithoutOthers(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.pass(time.Hour)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustUnprepare(t, m, "u1")
	if n := recordFiles(t, b); n != 0 {
		t.Errorf("%d files are left", n)
	}
	b.pass(-time.Minute)
	_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
	wantError(t, err, "out of date")
}

// recordFiles is how many files of claims there are.
func recordFiles(t *testing.T, b *box) int {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(b.dataDir(), "records"))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestReleaseTimesAreSwept: what says only when a claim was released goes once no call can be older.
func TestReleaseTimesAreSwept(t *testing.T) {
	b := newBox(t)
	m, other := b.manager(), b.manager()
	defer runtime.KeepAlive(other) // it might have an older call
	files := func() int { return recordFiles(t, b) }
	mustUnprepare(t, m, "u1")
	b.pass(10*time.Minute - time.Second)
	mustUnprepare(t, m, "u3")
	mustReconcile(t, m)
	if n := files(); n != 2 {
		t.Errorf("%d are left, want those of u1 and u3", n)
	}
	b.pass(time.Second)
	mustReconcile(t, m)
	if n := files(); n != 1 {
		t.Errorf("%d are left, want that of u3", n)
	}
	// What no call of this boot can be older than goes at once.
	b.boot("boot-2")
	m = b.manager()
	mustReconcile(t, m)
	if n := files(); n != 0 {
		t.Errorf("%d are left", n)
	}
}

// TestStalePrepareAfterFreshOne: the older call does not take from the claim what
// the newer one gave it.
func TestStalePrepareAfterFreshOne(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.pass(time.Hour)
	at := func(seconds int) context.Context {
		return arrivedAt(t.Context(), b.clock()-time.Minute+time.Duration(seconds)*time.Second)
	}
	if err := m.Unprepare(at(20), "u1"); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Prepare(at(30), newClaim("u1", sliceA4)); err != nil {
		t.Fatal(err)
	}
	before := b.state()
	if _, err := m.Prepare(at(10), newClaim("u1", sliceA0)); err == nil {
		t.Error("a call from before the release was let through")
	}
	b.wantState(t, "after the older call", before)
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
			o := b.options()
			o.Users = observing{o.Users, func() {
				if seen++; seen != nth {
					return
				}
				if err := other.Unprepare(arrivedAt(t.Context(), 20), "u1"); err != nil {
					t.Error(err)
				}
			}}
			m, err := NewManager(o)
			if err != nil {
				t.Fatal(err)
			}
			m.SetInventory(testInventory(t))
			b.hooks(failTimes("write spec", 1, gpu.ErrUnknown), nil)
			_, err = m.Prepare(arrivedAt(t.Context(), 10), newClaim("u1", wholeC))
			wantError(t, err, "out of date")
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
			b := newBox(t)
			old, m := b.manager(), b.manager()
			if err := m.Unprepare(arrivedAt(t.Context(), 20), "u1"); err != nil {
				t.Fatal(err)
			}
			if _, err := m.Prepare(arrivedAt(t.Context(), 30), test.claim()); err != nil {
				t.Fatal(err)
			}
			if test.lose {
				b.mu.Lock()
				delete(b.specs, "u1")
				b.mu.Unlock()
			}
			before := b.state()
			_, err := old.Prepare(arrivedAt(t.Context(), 10), test.claim())
			wantError(t, err, "out of date")
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
		b := newBox(t)
		old, m := b.manager(), b.manager()
		mustPrepare(t, m, newClaim("other", sliceA0))
		began, done := time.Now(), make(chan error)
		go func() {
			_, err := old.Prepare(arrivedAt(t.Context(), 10), newClaim("u1", sliceA0))
			done <- err
		}()
		synctest.Wait()
		if err := m.Unprepare(arrivedAt(t.Context(), 20), "u1"); err != nil {
			t.Error(err)
		}
		if err := <-done; err == nil || !strings.Contains(err.Error(), "out of date") || time.Since(began) > 2*time.Second {
			t.Errorf("the late call ends after %s: %v", time.Since(began), err)
		}
	})
}

// TestReconcileBesideRelease: a release that has just come is no news, whichever process is at work on it.
func TestReconcileBesideRelease(t *testing.T) {
	for name, same := range map[string]bool{"the same": true, "the other": false} {
		b := newBox(t)
		old, m := b.manager(), b.manager()
		if same {
			m = old
		}
		mustPrepare(t, old, newClaim("u1", sliceA0))
		b.pass(time.Hour)
		if _, err := old.store.Release("u1", b.clock()); err != nil {
			t.Fatal(err)
		}
		if status, err := m.Reconcile(t.Context()); len(status.Conditions) > 0 || err != nil {
			t.Errorf("%s process: %+v, %v", name, status.Conditions, err)
		}
	}
}
