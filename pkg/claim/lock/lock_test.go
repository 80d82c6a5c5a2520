// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/gpu"
)

const (
	pciA = claimtest.PCIA
	pciB = claimtest.PCIB
	pciC = claimtest.PCIC
)

// twoProcesses share a folder of locks: file locks belong to an open file, so
// that two values in one process exclude each other as two processes do.
func twoProcesses(t *testing.T) (*Locks, *Locks) {
	t.Helper()
	dir := t.TempDir()
	return open(t, dir), open(t, dir)
}

func open(t *testing.T, dir string) *Locks {
	t.Helper()
	l, err := New(dir)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestFileRemoved shows that two processes do not work on one GPU although somebody has removed the file of the
// locks: the one that comes later waits until the other has ended.
func TestFileRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "locks")
	before := open(t, dir)
	release := mustTake(t, before, pciA)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	after := []*Locks{open(t, dir), open(t, dir)}
	for _, l := range after {
		for _, address := range []string{pciA, pciB} {
			if got, err := l.TryGPU(address); got != nil || err != nil || !l.GPUElsewhere(address) {
				t.Errorf("GPU %s: got the lock, or %v", address, err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*filePoll)
		if _, err := l.GPUs(ctx, []string{pciA}); !errors.Is(err, ErrElsewhere) {
			t.Errorf("got %v", err)
		}
		cancel()
	}
	release()
	mustTake(t, before, pciB)() // its own file is as good as ever
	// The process ends.
	_, _ = before.file.Close(), before.folder.Close()
	release = mustTake(t, after[0], pciA)
	if got, err := after[1].TryGPU(pciA); got != nil || err != nil {
		t.Errorf("got a lock that is held, or %v", err)
	}
	release()
	mustTake(t, after[1], pciA)()
}

func TestLocksExclude(t *testing.T) {
	a, b := twoProcesses(t)
	var inside, wrong atomic.Int32
	var wg sync.WaitGroup
	for i := range 16 {
		l := []*Locks{a, b}[i%2]
		wg.Go(func() {
			for range 20 {
				release, err := l.Claim(t.Context(), "u1")
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
	if len(a.taken)+len(b.taken)+len(a.waiting)+len(b.waiting) != 0 {
		t.Error("something is left")
	}
}

func TestLocksWaitNoLongerThanAllowed(t *testing.T) {
	synctest.Test(t, testLocksWait)
}

func testLocksWait(t *testing.T) {
	a, b := twoProcesses(t)
	release, err := a.GPUs(t.Context(), []string{pciA, pciB})
	if err != nil {
		t.Fatal(err)
	}
	for name, l := range map[string]*Locks{"same process": a, "other process": b} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		start := time.Now()
		_, err := l.GPUs(ctx, []string{pciB})
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrBusy) || time.Since(start) > time.Second {
			t.Errorf("%s: after %s: got %v", name, time.Since(start), err)
		}
		claimtest.WantError(t, err, "GPU "+pciB+" is busy with another claim")
		if elsewhere := l == b; errors.Is(err, ErrElsewhere) != elsewhere || l.GPUElsewhere(pciB) != elsewhere {
			t.Errorf("%s: held by another process: got %v (%v), want %v", name, errors.Is(err, ErrElsewhere), err, elsewhere)
		}
		// Another GPU is free.
		free, err := l.GPUs(t.Context(), []string{pciC})
		if err != nil {
			t.Fatal(err)
		}
		free()
	}
	release()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.GPUs(cancelled, []string{pciA}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	all, err := b.GPUs(t.Context(), []string{pciA, pciB, pciC})
	if err != nil {
		t.Fatal(err)
	}
	all()
}

// TestLocksWaitHoldingNothing shows that a caller that waits for a busy GPU does not
// delay those that want another one.
func TestLocksWaitHoldingNothing(t *testing.T) {
	for name, other := range map[string]bool{"same process": false, "other process": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := twoProcesses(t)
				holder := a
				if other {
					holder = b
				}
				release, err := holder.GPUs(t.Context(), []string{pciB})
				if err != nil {
					t.Fatal(err)
				}
				both := make(chan func())
				go func() {
					r, err := a.GPUs(t.Context(), []string{pciA, pciB})
					if err != nil {
						t.Error(err)
					}
					both <- r
				}()
				synctest.Wait()
				for _, l := range []*Locks{a, b} {
					free, err := l.GPUs(t.Context(), []string{pciA})
					if err != nil {
						t.Fatal(err)
					}
					free()
				}
				release()
				(<-both)()
			})
		})
	}
}

// TestHungCallKeepsItsGPU shows that a call that does not return keeps its GPU from
// everybody, and no other GPU.
func TestHungCallKeepsItsGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := twoProcesses(t)
		release, err := a.GPUs(t.Context(), []string{pciA, pciB})
		if err != nil {
			t.Fatal(err)
		}
		waiting := make(chan error)
		go func() {
			_, err := a.GPUs(t.Context(), []string{pciB, pciC})
			waiting <- err
		}()
		synctest.Wait()
		done := make(chan struct{})
		_ = a.Watch(pciB, &gpu.PendingError{Call: "nvmlSomething", PCIAddress: pciB, Done: done})
		var call *gpu.PendingError
		if err := <-waiting; !errors.As(err, &call) {
			t.Errorf("waiter: got %v", err)
		}
		for range 2 { // while the lock is held, and when its holder has left
			_, err := a.GPUs(t.Context(), []string{pciB})
			claimtest.WantError(t, err, "GPU "+pciB+" is not used", "nvmlSomething")
			if _, err := a.TryGPU(pciB); !errors.As(err, &call) {
				t.Errorf("try: got %v", err)
			}
			if got, err := b.TryGPU(pciB); got != nil || err != nil {
				t.Errorf("other process: got the lock, or %v", err)
			}
			release()
			release = func() {}
		}
		for _, l := range []*Locks{a, b} {
			free, err := l.GPUs(t.Context(), []string{pciA, pciC})
			if err != nil {
				t.Fatal(err)
			}
			free()
		}
		close(done)
		for _, l := range []*Locks{a, b} {
			free, err := l.GPUs(t.Context(), []string{pciB})
			if err != nil {
				t.Fatal(err)
			}
			free()
		}
	})
}

func TestTryClaim(t *testing.T) {
	a, b := twoProcesses(t)
	release, err := a.Claim(t.Context(), "u1")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []*Locks{a, b} {
		if got, err := l.TryClaim("u1"); err != nil || got != nil {
			t.Errorf("got a lock that is held, or %v", err)
		}
	}
	release()
	got, err := b.TryClaim("u1")
	if err != nil || got == nil {
		t.Fatalf("got none, %v", err)
	}
	got()
}

// TestLockOfSeveralCalls shows that more than one call may be out, because what only
// looks at a GPU takes no lock. The lock is free when the last has returned.
func TestLockOfSeveralCalls(t *testing.T) {
	l, other := twoProcesses(t)
	release, err := l.GPUs(t.Context(), []string{pciA})
	if err != nil {
		t.Fatal(err)
	}
	create, discover := make(chan struct{}), make(chan struct{})
	_ = l.Watch(pciA, &gpu.PendingError{Call: "create", Done: create})
	_ = l.Watch(pciA, &gpu.PendingError{Call: "discover", Done: discover})
	release()
	close(discover)
	// Of one call each caller has an error of its own.
	for range 2 {
		_ = l.Watch(pciA, &gpu.PendingError{Call: "create", Done: create, Err: fmt.Errorf("%w: %w", gpu.ErrSlow, context.Canceled)})
	}
	if out := l.hung[gpuLock(pciA)]; len(out) != 1 || !errors.Is(out[0], gpu.ErrSlow) || errors.Is(out[0], context.Canceled) {
		t.Errorf("out are %v", out)
	}
	if got, err := other.TryGPU(pciA); got != nil || err != nil {
		t.Errorf("another process has the lock while a call is out: %v, %v", got != nil, err)
	}
	close(create)
	got, err := other.GPUs(t.Context(), []string{pciA})
	if err != nil {
		t.Fatal(err)
	}
	got()
}

// TestCallThatReturnedMeanwhile shows that such a call keeps nobody from its GPU.
func TestCallThatReturnedMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := twoProcesses(t)
		release, err := l.GPUs(t.Context(), []string{pciA})
		if err != nil {
			t.Fatal(err)
		}
		waiter := make(chan error, 1)
		go func() {
			release, err := l.GPUs(t.Context(), []string{pciA})
			if err == nil {
				release()
			}
			waiter <- err
		}()
		synctest.Wait()
		done := make(chan struct{})
		close(done)
		_ = l.Watch(pciA, &gpu.PendingError{Call: "create", Done: done})
		release()
		if err := <-waiter; err != nil {
			t.Error(err)
		}
	})
}
