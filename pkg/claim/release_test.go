// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
)

// Pods end, whatever keeps the hardware from being released: at once for a reason that is
// known to last, otherwise after a while. The place stays tainted, the CDI spec goes.
func TestPodsEnd(t *testing.T) {
	for name, test := range map[string]struct {
		err    error
		lasts  bool
		effect string
		device string
	}{
		"in use":           {gpu.ErrInUse, true, "destroy instance", sliceA0},
		"no permission":    {gpu.ErrNoPermission, true, "destroy instance", sliceA0},
		"version mismatch": {gpu.ErrVersionMismatch, true, "destroy instance", sliceA0},
		"program too slow": {context.DeadlineExceeded, true, "interval Default", turnsA},
		"any other":        {errors.New("internal error 7"), false, "destroy instance", sliceA0},
	} {
		runInBubble(t, name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", test.device))
			b.hooks(func(e string) error {
				if e == test.effect {
					return test.err
				}
				return nil
			}, nil)
			err := m.Unprepare(t.Context(), "u1")
			if (err == nil) != test.lasts {
				t.Errorf("the first time: %v", err)
			}
			b.pass(maxFailing)
			mustUnprepare(t, m, "u1")
			if b.spec("u1") != nil {
				t.Error("the spec is left")
			}
			pending := false
			for _, c := range m.Survey(t.Context()).Conditions {
				pending = pending || strings.Contains(c.Message, "to be released")
			}
			if !pending {
				t.Error("the place is not tainted")
			}
			wantError(t, m.Reconcile(t.Context()), "claim u1")
			b.hooks(nil, nil)
			mustReconcile(t, m)
			b.wantNothing()
		})
	}
}

// A claim that exists and is not allocated here any more is released in the end: the
// kubelet has lost its state and will not do it.
func TestDeallocatedClaim(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustPrepare(t, m, newClaim("u2", sliceA4))
	b.mu.Lock()
	b.deallocated["u1"] = true
	b.mu.Unlock()
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace - time.Second)
	mustReconcile(t, m)
	if r, err := m.store.Read("u1"); err != nil || r == nil {
		t.Errorf("released before its time: %v, %v", r, err)
	}
	b.pass(time.Second)
	mustReconcile(t, m)
	if r, err := m.store.Read("u1"); err != nil || r != nil {
		t.Errorf("it has %+v, %v", r, err)
	}
	mustPrepare(t, m, newClaim("u3", sliceA0))
	mustUnprepare(t, m, "u3")
	mustUnprepare(t, m, "u2")
	b.wantNothing()
}

// A process that cannot die has the lock of a claim. The pod ends, and the claim is
// released when the lock is free, unless it was prepared again meanwhile.
func TestClaimLockOfDeadProcess(t *testing.T) {
	for name, again := range map[string]bool{"released": false, "prepared again": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m, dead := b.manager(), b.manager()
				b.pass(time.Minute)
				mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
				giveBack, err := dead.locks.Claim(t.Context(), "u1")
				if err != nil {
					t.Fatal(err)
				}
				b.pass(time.Minute)
				for _, limit := range []time.Duration{2 * time.Second, 45 * time.Second} {
					ctx, cancel := context.WithTimeout(t.Context(), limit)
					if err := m.Unprepare(ctx, "u1"); err != nil {
						t.Errorf("the pod cannot end: %v", err)
					}
					cancel()
				}
				if b.spec("u1") != nil {
					t.Error("the spec is left")
				}
				mustReconcile(t, m) // somebody has the claim
				giveBack()
				b.pass(time.Minute)
				if again {
					mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
				}
				mustReconcile(t, m)
				if r, err := m.store.Read("u1"); err != nil || (r != nil) != again {
					t.Errorf("it has %+v, %v", r, err)
				}
				if again {
					mustUnprepare(t, m, "u1")
				}
				b.wantNothing()
			})
		})
	}
}

// Two processes find the last two shares of a GPU orphaned at the same time. Processes
// that run on it keep one of them.
func TestLastSharesOrphanedInTwoProcesses(t *testing.T) {
	for range 20 {
		b := newBox(t)
		one, two := b.manager(), b.manager()
		mustPrepare(t, one, newClaim("u1", turnsC))
		mustPrepare(t, two, newClaim("u2", turnsC))
		b.run(pciC, gpu.Process{PID: 4711, InstanceID: -1})
		var wg sync.WaitGroup
		for uid, m := range map[types.UID]*Manager{"u1": one, "u2": two} {
			wg.Go(func() {
				r, err := m.load(t.Context(), uid)
				if err != nil {
					t.Error(err)
					return
				}
				_ = m.reconciler.releaseOrphan(t.Context(), r)
			})
		}
		wg.Wait()
		kept := 0
		for _, uid := range []types.UID{"u1", "u2"} {
			if r, err := one.store.Read(uid); err == nil && r != nil && r.State == record.Prepared {
				kept++
			}
		}
		if kept != 1 {
			t.Fatalf("%d shares are kept, and a process runs on the GPU", kept)
		}
	}
}

// A record that was damaged by a loss of power is about nothing that exists.
func TestDamagedByLossOfPower(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	write(t, m.store.Path("u1"), "")
	b.boot("boot-2")
	m = b.manager()
	mustReconcile(t, m)
	mustUnprepare(t, m, "u1")
	b.makeForeign(addressA4)
	if s := m.Survey(t.Context()); len(s.Static) != 1 || len(s.Conditions) != 0 {
		t.Errorf("got %+v", s)
	}
	if files := b.quarantined("boot-1"); len(files) != 1 {
		t.Errorf("for people: %v", files)
	}
}

// A damaged record of a whole GPU's claim says nothing about partitions.
func TestDamagedRecordOfWholeGPU(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", wholeC))
	data := strings.Replace(recordText(t, m, "u1"), `"prepared"`, `7`, 1)
	write(t, m.store.Path("u1"), data)
	b.makeForeign(addressA4)
	if s := m.Survey(t.Context()); len(s.Static) != 1 || len(s.Conditions) != 0 {
		t.Errorf("got %+v", s)
	}
	wantError(t, m.Unprepare(t.Context(), "u1"), "damaged")
	mustUnprepare(t, m, "u1")
	if files := b.quarantined("boot-1"); len(files) != 0 {
		t.Errorf("the claim is released, and in quarantine are %v", files)
	}
}
