// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
)

const (
	// roomTime is how long a claim waits for its place, poll how often it looks.
	roomTime = 15 * time.Second
	poll     = time.Second
)

func TestOverlap(t *testing.T) {
	for name, test := range map[string]struct {
		first, second string
		refused       bool
	}{
		"same partition":         {sliceA0, sliceA0, true},
		"placements overlap":     {halfA0, sliceA1, true},
		"partition of the whole": {wholeA, sliceA1, true},
		"whole of a partition":   {sliceA1, wholeA, true},
		"same whole":             {wholeC, wholeC, true},
		"beside":                 {halfA4, sliceA1, false},
		"other GPU":              {wholeA, sliceB0, false},
		// As schedulers before Kubernetes 1.36.2 allocate, see test/allocators.
		"whole of MPS shares":        {mpsA, wholeA, true},
		"partition of MPS shares":    {mpsA, sliceA1, true},
		"time slices of MPS shares":  {mpsA, turnsA, true},
		"whole of time slices":       {turnsA, wholeA, true},
		"partition of time slices":   {turnsA, sliceA1, true},
		"MPS shares of time slices":  {turnsA, mpsA, true},
		"partition of shares of it":  {mpsSliceA0, sliceA0, true},
		"whole of shares of a part":  {mpsSliceA0, wholeA, true},
		"MPS shares of the whole":    {wholeA, mpsA, true},
		"MPS shares of a part":       {sliceA1, mpsA, true},
		"another MPS share":          {mpsA, mpsA, false},
		"MPS shares beside the part": {mpsSliceA0, sliceA1, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { testOverlap(t, test.first, test.second, test.refused) })
		})
	}
}

func testOverlap(t *testing.T, first, second string, refused bool) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("first", first))
	before := b.state()
	start := time.Now()
	_, err := b.manager().Prepare(t.Context(), newClaim("second", second))
	if !refused {
		if err != nil || time.Since(start) > 0 {
			t.Errorf("after %s: got %v", time.Since(start), err)
		}
		return
	}
	var overlap *rules.Verdict
	if !errors.As(err, &overlap) || !errors.Is(err, rules.ErrTaken) || overlap.Other != "first" {
		t.Errorf("got %v", err)
	}
	wantError(t, err, second, first, "default/claim-first", "prepared", "not released in time")
	if waited := time.Since(start); waited < roomTime || waited > roomTime+poll {
		t.Errorf("waited for %s", waited)
	}
	if diff := cmp.Diff(before, b.state()); diff != "" {
		t.Errorf("the refusal changed: -before +after:\n%s", diff)
	}
	mustUnprepare(t, m, "first")
	mustPrepare(t, m, newClaim("second", second))
	mustUnprepare(t, m, "second")
	b.wantNothing()
}

// A scheduler gives a share and the whole GPU away at once: whichever claim comes first
// has its device, the other is refused and has nothing, and nobody loses what runs.
func TestOverlapAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		claims := map[types.UID]string{"share": mpsA, "whole": wholeA, "part": sliceA1}
		type outcome struct {
			uid types.UID
			err error
		}
		outcomes := make(chan outcome)
		for uid, device := range claims {
			go func() {
				_, err := m.Prepare(t.Context(), newClaim(string(uid), device))
				outcomes <- outcome{uid, err}
			}()
		}
		var winner types.UID
		for range claims {
			got := <-outcomes
			var overlap *rules.Verdict
			switch {
			case got.err == nil && winner != "":
				t.Errorf("%s and %s were both prepared", winner, got.uid)
			case got.err == nil:
				winner = got.uid
			case !errors.As(got.err, &overlap):
				t.Errorf("%s: %v", got.uid, got.err)
			case b.spec(got.uid) != nil:
				t.Errorf("%s was refused and has a CDI spec", got.uid)
			}
		}
		if winner == "" {
			t.Fatal("nobody got anything")
		}
		mustPrepare(t, m, newClaim(string(winner), claims[winner]))
		mustUnprepare(t, m, winner)
		b.wantNothing()
	})
}

// A device has only so many shares. Whoever gives one back makes room.
func TestTooManyShares(t *testing.T) {
	for _, device := range []string{mpsA, turnsA, mpsSliceA0} {
		t.Run(device, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				for _, uid := range []string{"first", "second", "third"} {
					mustPrepare(t, m, newClaim(uid, device))
				}
				before := b.state()
				start := time.Now()
				_, err := m.Prepare(t.Context(), newClaim("two", device, device))
				var overlap *rules.Verdict
				if !errors.As(err, &overlap) || !errors.Is(err, rules.ErrTaken) {
					t.Errorf("got %v", err)
				}
				wantError(t, err, device, "has 4 shares and all are taken", "default/claim-", "not released in time")
				if waited := time.Since(start); waited < roomTime || waited > roomTime+poll {
					t.Errorf("waited for %s", waited)
				}
				if diff := cmp.Diff(before, b.state()); diff != "" {
					t.Errorf("the refusal changed: -before +after:\n%s", diff)
				}

				prepared := make(chan error)
				go func() {
					_, err := m.Prepare(t.Context(), newClaim("two", device, device))
					prepared <- err
				}()
				synctest.Wait()
				mustUnprepare(t, b.manager(), "second")
				if err := <-prepared; err != nil {
					t.Error(err)
				}
				for _, uid := range []string{"first", "third", "two"} {
					mustUnprepare(t, m, types.UID(uid))
				}
				b.wantNothing()
			})
		})
	}
}

// The policy has fewer shares than claims had before the machine was started anew: they
// all have theirs again, and nobody else gets one.
func TestFewerSharesAfterReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		uids := []string{"u1", "u2", "u3"}
		for _, uid := range uids {
			mustPrepare(t, m, newClaim(uid, mpsA))
		}
		b.boot("boot-2")
		m = b.manager()
		fewer := testPolicy()
		fewer.Default.MPS.Clients = 2
		inventory, err := device.NewInventory(testNode(), device.Terms{Policy: fewer, Limited: true})
		if err != nil {
			t.Fatal(err)
		}
		m.SetInventory(inventory)
		for _, uid := range uids {
			mustPrepare(t, m, newClaim(uid, mpsA))
		}
		_, err = m.Prepare(t.Context(), newClaim("u4", mpsA))
		wantError(t, err, "device "+mpsA+" has 2 shares and all are taken")
		for _, uid := range uids {
			mustUnprepare(t, m, types.UID(uid))
		}
		b.wantNothing()
	})
}

// A claim that comes while the place is still taken gets it as soon as it is free,
// whichever process frees it. Meanwhile it is in nobody's way.
func TestWaitForPlace(t *testing.T) {
	for name, other := range map[string]bool{"same process": false, "other process": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				releasing := m
				if other {
					releasing = b.manager()
				}
				mustPrepare(t, m, newClaim("first", sliceA0))
				done := make(chan error)
				go func() {
					_, err := m.Prepare(t.Context(), newClaim("second", halfA0))
					done <- err
				}()
				// Everybody has come to rest, so it waits.
				synctest.Wait()
				mustPrepare(t, m, newClaim("third", sliceA4))
				start := time.Now()
				mustUnprepare(t, releasing, "first")
				if err := <-done; err != nil {
					t.Errorf("the second claim: %v", err)
				}
				if waited := time.Since(start); waited > poll || (!other && waited > 0) {
					t.Errorf("waited for another %s", waited)
				}
				mustUnprepare(t, m, "second")
				mustUnprepare(t, m, "third")
				b.wantNothing()
			})
		})
	}
}

// The wait ends with the call.
func TestWaitForPlaceEndsWithCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, newClaim("first", sliceA0))
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		start := time.Now()
		_, err := m.Prepare(ctx, newClaim("second", sliceA0))
		var overlap *rules.Verdict
		if !errors.As(err, &overlap) || time.Since(start) != 3*time.Second {
			t.Errorf("after %s: got %v", time.Since(start), err)
		}
	})
}

// What an abandoned claim left is cleared out of the way of the next.
func TestOverlapWithAbandoned(t *testing.T) {
	for _, effect := range []string{"create compute instance", "write prepared"} {
		synctest.Test(t, func(t *testing.T) { testAbandoned(t, effect) })
	}
}

func testAbandoned(t *testing.T, effect string) {
	b := newBox(t)
	dying := b.manager()
	b.hooks(nil, b.killAt(effect))
	if _, err := dying.Prepare(t.Context(), newClaim("dead", sliceA0)); !b.killed() {
		t.Fatalf("not killed: %v", err)
	}
	b.hooks(nil, nil)
	m := b.manager()
	_, err := m.Prepare(t.Context(), newClaim("next", halfA0))
	if effect == "write prepared" {
		wantError(t, err, "default/claim-dead")
		mustUnprepare(t, m, "dead")
		_, err = m.Prepare(t.Context(), newClaim("next", halfA0))
	}
	if err != nil {
		t.Errorf("killed at %q: %v", effect, err)
	}
	mustUnprepare(t, m, "next")
	b.wantNothing()
}

func TestOtherDevicesThanBefore(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustPrepare(t, m, newClaim("u1", sliceB0))
	if b.count(pciA) != 0 || b.count(pciB) != 1 {
		t.Errorf("instances: %v", b.state())
	}
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}

// TestWaitNamesUsers: who waits for a GPU that is given back is told which process still has it.
func TestWaitNamesUsers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, newClaim("u1", wholeA))
		const ended = 4194305 // the kernel gives no process this ID
		b.run(pciA, gpu.Process{PID: ended, InstanceID: -1})
		mustUnprepare(t, m, "u1")
		_, err := m.Prepare(t.Context(), newClaim("u2", wholeA))
		wantError(t, err, "being released for claim default/claim-u1", "is in use: process 4194305 (has ended, its memory is still held)", "was not released in time")
		b.run(pciA)
		mustPrepare(t, m, newClaim("u2", wholeA))
	})
}

// The scheduler counts the shares of a device. After a pod was deleted by force there
// is one more for a while, and the next claim waits.
func TestNoShareLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		for _, uid := range []string{"u1", "u2", "u3", "u4"} {
			mustPrepare(t, m, newClaim(uid, mpsA))
		}
		mustPrepare(t, m, newClaim("u4", mpsA))
		before := b.state()
		start := time.Now()
		_, err := m.Prepare(t.Context(), newClaim("u5", mpsA))
		var overlap *rules.Verdict
		if !errors.As(err, &overlap) || !errors.Is(err, rules.ErrTaken) {
			t.Errorf("got %v", err)
		}
		wantError(t, err, "device "+mpsA+" has 4 shares", "was not released in time")
		if waited := time.Since(start); waited < roomTime {
			t.Errorf("waited for %s only", waited)
		}
		b.wantState(t, "refused", before)

		done := make(chan error)
		go func() {
			_, err := m.Prepare(t.Context(), newClaim("u5", mpsA))
			done <- err
		}()
		synctest.Wait()
		mustUnprepare(t, m, "u3")
		if err := <-done; err != nil {
			t.Error(err)
		}
		for _, uid := range []types.UID{"u1", "u2", "u4", "u5"} {
			mustUnprepare(t, m, uid)
		}
		b.wantNothing()
	})
}

// TestWaitBesideTraffic: a wait for a place does not end early because claims come and go elsewhere.
func TestWaitBesideTraffic(t *testing.T) {
	for _, every := range []time.Duration{time.Second, 250 * time.Millisecond} {
		t.Run(every.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				mustPrepare(t, m, newClaim("first", sliceA0))
				done := make(chan error, 1)
				began := time.Now()
				var took atomic.Int64
				go func() {
					_, err := m.Prepare(t.Context(), newClaim("second", sliceA0))
					took.Store(int64(time.Since(began)))
					done <- err
				}()
				synctest.Wait()
				n := 0
				for time.Since(began) < 13*time.Second {
					uid := fmt.Sprint("beside", n)
					mustPrepare(t, m, newClaim(uid, sliceB0))
					synctest.Wait()
					mustUnprepare(t, m, types.UID(uid))
					synctest.Wait()
					n++
					time.Sleep(every)
				}
				mustUnprepare(t, m, "first")
				if err := <-done; err != nil {
					t.Errorf("%d claims of GPU B came and went; the wait for GPU A ended after %s of 15 s: %v", n, time.Duration(took.Load()), err)
				}
			})
		})
	}
}
