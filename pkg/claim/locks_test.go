// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
)

// twoProcesses share a folder of locks: file locks belong to an open file, so
// that two values in one process exclude each other as two processes do.
func twoProcesses(t *testing.T) (*locks, *locks) {
	t.Helper()
	dir := t.TempDir()
	a, err := newLocks(dir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := newLocks(dir)
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

func TestLocksExclude(t *testing.T) {
	a, b := twoProcesses(t)
	var inside, wrong atomic.Int32
	var wg sync.WaitGroup
	for i := range 16 {
		l := []*locks{a, b}[i%2]
		wg.Go(func() {
			for range 20 {
				release, err := l.claim(t.Context(), "u1")
				if err != nil {
					t.Error(err)
					return
				}
				if inside.Add(1) != 1 {
					wrong.Add(1)
				}
				inside.Add(-1)
				release()
			}
		})
	}
	wg.Wait()
	if wrong.Load() > 0 {
		t.Errorf("%d times two held the lock", wrong.Load())
	}
	if entries, err := os.ReadDir(a.dir); err != nil || len(entries) != 0 {
		t.Errorf("lock files are left: %v, %v", entries, err)
	}
	if len(a.queues) != 0 || len(b.queues) != 0 {
		t.Error("queues are left")
	}
}

func TestLocksWaitNoLongerThanAllowed(t *testing.T) {
	a, b := twoProcesses(t)
	release, err := a.gpus(t.Context(), []string{pciA, pciB})
	if err != nil {
		t.Fatal(err)
	}
	for name, l := range map[string]*locks{"same process": a, "other process": b} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := l.gpus(ctx, []string{pciB})
			done <- err
		}()
		cancel()
		err := <-done
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v", name, err)
		}
		wantError(t, err, "GPU "+pciB+" is busy")
		// Another GPU is free.
		free, err := l.gpus(t.Context(), []string{pciC})
		if err != nil {
			t.Fatal(err)
		}
		free()
	}
	release()
	// What was taken before the failure was given back.
	ctx, cancel := context.WithCancel(t.Context())
	held, err := a.gpus(t.Context(), []string{pciB})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		_, err := a.gpus(ctx, []string{pciA, pciB})
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	held()
	all, err := b.gpus(t.Context(), []string{pciA, pciB, pciC})
	if err != nil {
		t.Fatal(err)
	}
	all()
}

func TestTryClaim(t *testing.T) {
	a, b := twoProcesses(t)
	release, err := a.claim(t.Context(), "u1")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []*locks{a, b} {
		if got, err := l.tryClaim("u1"); err != nil || got != nil {
			t.Errorf("got a lock that is held, or %v", err)
		}
	}
	if err := b.sweep(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(a.path("claim-u1")); err != nil {
		t.Errorf("a lock in use was swept away: %v", err)
	}
	release()
	got, err := b.tryClaim("u1")
	if err != nil || got == nil {
		t.Fatalf("got none, %v", err)
	}
	got()
}

func TestInLockOrder(t *testing.T) {
	got := inLockOrder([]string{"10000:01:00.0", pciB, pciA, pciB})
	if len(got) != 3 || got[0] != pciA || got[1] != pciB || got[2] != "10000:01:00.0" {
		t.Errorf("got %v", got)
	}
}
