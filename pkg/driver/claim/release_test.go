// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Pods end, whatever keeps the hardware from being released. The place stays tainted, the CDI spec goes.
func TestPodsEnd(t *testing.T) {
	for name, test := range map[string]struct {
		err    error
		effect string
		device string
	}{
		"in use":           {gpu.ErrInUse, "destroy instance", sliceA0},
		"no permission":    {gpu.ErrNoPermission, "destroy instance", sliceA0},
		"version mismatch": {gpu.ErrVersionMismatch, "destroy instance", sliceA0},
		"program too slow": {context.DeadlineExceeded, "interval Default", turnsA},
		"any other":        {errors.New("internal error 7"), "destroy instance", sliceA0},
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
			mustUnprepare(t, m, "u1")
			if b.spec("u1") != nil {
				t.Error("the spec is left")
			}
			pending := false
			for _, c := range survey(t.Context(), m).Conditions {
				pending = pending || strings.Contains(c.Message, "to be released")
			}
			if !pending {
				t.Error("the place is not tainted")
			}
			wantError(t, m.cleanUp(t.Context()), "claim default/claim-u1")
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

// Two processes find the last two shares of a GPU orphaned at the same time. As long as a process runs on it nobody else gets it,
// whether or not each of them has seen the other one's first.
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

// TestClearFailsOnce: that the last write of a release fails once leaves nothing, and is in nobody's way.
func TestClearFailsOnce(t *testing.T) {
	for name, next := range map[string]func(t *testing.T, m *Manager){
		"released": func(t *testing.T, m *Manager) { mustUnprepare(t, m, "u1") },
		"allocated anew": func(t *testing.T, m *Manager) {
			mustPrepare(t, m, newClaim("u1", sliceA0))
			mustUnprepare(t, m, "u1")
		},
		"the place given to the next": func(t *testing.T, m *Manager) {
			mustUnprepare(t, m, "u1")
			mustPrepare(t, m, newClaim("u2", sliceB0))
			mustUnprepare(t, m, "u2")
		},
	} {
		runInBubble(t, name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", sliceB0))
			failed := false
			b.hooks(func(e string) error {
				if e == "delete record" && !failed {
					failed = true
					return os.ErrDeadlineExceeded
				}
				return nil
			}, nil)
			began := time.Now()
			next(t, m)
			if !failed || time.Since(began) > 0 {
				t.Errorf("failed %t, waited for %s", failed, time.Since(began))
			}
			b.wantNothing()
		})
	}
}

// TestReleaseOfGuardUnwritten: something may be left of a claim whose record cannot be read and whose GPU does not answer. Where
// its release cannot be written down either, nobody is told that it is over.
func TestReleaseOfGuardUnwritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
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
		if left := b.guards(); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// TestReleasedWhileSpecIsWritten: whatever reconciliation was about to write of a claim is gone when its release has returned, also
// where the record cannot be read any more, so that no round looks after the claim.
func TestReleasedWhileSpecIsWritten(t *testing.T) {
	for name, other := range map[string]func(*box, *Manager) *Manager{
		"in this process":    func(_ *box, m *Manager) *Manager { return m },
		"in another process": func(b *box, _ *Manager) *Manager { return b.manager() },
	} {
		for _, damaged := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, damaged %t", name, damaged), func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				mustPrepare(t, m, newClaim("u1", sliceA0))
				b.specs["u1"] = nil // the driver was upgraded
				releaser := other(b, m)
				release := sync.OnceFunc(func() {
					if damaged {
						damage(t, m, "u1")
					}
					unprepareWithoutGPU(t.Context(), t, releaser)
				})
				b.hooks(func(effect string) error {
					if effect == "write spec" {
						release()
					}
					return nil
				}, nil)
				_ = m.cleanUp(t.Context())
				b.hooks(nil, nil)
				if left, found := b.specs["u1"]; found {
					t.Errorf("the spec is there again: %v", left)
				}
			})
		}
	}
}

// unprepareWithoutGPU releases u1 while somebody has the lock of its GPU, for which the release has no time.
func unprepareWithoutGPU(ctx context.Context, t *testing.T, m *Manager) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if err := m.Unprepare(ctx, "u1"); err != nil {
		t.Error(err)
	}
}

// TestReleaseOfEarlierPodWhileSpecIsWritten: the spec that a younger call writes stays, also where the disk says that the call's last write
// has failed, and it has not.
func TestReleaseOfEarlierPodWhileSpecIsWritten(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	earlier := arrivedAt(t.Context(), b.clock())
	release := sync.OnceFunc(func() { unprepareWithoutGPU(earlier, t, m) })
	b.hooks(func(effect string) error {
		if effect == "write spec" {
			release()
		}
		return nil
	}, failTimes("mark prepared", 1, errFault))
	mustPrepare(t, m, newClaim("u1", sliceA0))
	if b.spec("u1") == nil {
		t.Errorf("the claim is prepared and has no spec: %q", b.seen())
	}
}
