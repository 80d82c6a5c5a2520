// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/test/claimtest"
)

const (
	pciA = claimtest.PCIA
	pciB = claimtest.PCIB
	pciC = claimtest.PCIC
)

// twoProcesses share a folder of locks: its locks belong to an open file, so
// that two values in one process exclude each other as two processes do.
func twoProcesses(t *testing.T) (*Locks, *Locks) {
	t.Helper()
	dir := t.TempDir()
	return open(t, dir), open(t, dir)
}

func open(t *testing.T, dir string) *Locks {
	t.Helper()
	l, err := New(dir, call.New(0))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// makeCall makes a call on a GPU that returns when it is let go. Its caller waits for as long as it is told.
func makeCall(t *testing.T, l *Locks, pciAddress string, patience time.Duration) (letGo func(), gaveUp <-chan error) {
	t.Helper()
	gate, failed := make(chan struct{}), make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := call.Do(ctx, l.calls.GPU(pciAddress), "nvmlSomething", func() (int, error) { <-gate; return 0, nil })
		failed <- err
	}()
	synctest.Wait()
	return func() { close(gate); synctest.Wait() }, failed
}

// TestEverythingRemoved shows that two processes do not work on one GPU although somebody has removed all that is in the
// folder. No lock needs a file.
func TestEverythingRemoved(t *testing.T) {
	dir := t.TempDir()
	before := open(t, dir)
	release := mustTake(t, before, pciA)
	files, err := os.ReadDir(dir)
	if err != nil || len(files) > 0 {
		t.Errorf("%d files: %v", len(files), err)
	}
	after := open(t, dir)
	if _, err := try(after, pciA); !errors.Is(err, ErrBusy) || after.elsewhere(gpuLock(pciA)) == nil || before.elsewhere(gpuLock(pciA)) != nil {
		t.Errorf("got a lock that is held, or %v", err)
	}
	mustTake(t, after, pciB)()
	ctx, cancel := context.WithTimeout(t.Context(), 2*poll)
	defer cancel()
	if _, err := after.GPUs(ctx, []string{pciA}); !errors.Is(err, ErrElsewhere) {
		t.Errorf("got %v", err)
	}
	// The process ends without giving back its lock.
	if err := before.folder.Close(); err != nil {
		t.Fatal(err)
	}
	mustTake(t, after, pciA)()
	release()
}

// TestProcessesExclude has many processes try for the same lock at the same time.
func TestProcessesExclude(t *testing.T) {
	dir := t.TempDir()
	var inside, taken atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		l := open(t, dir)
		wg.Go(func() {
			for range 2000 {
				release, err := l.TryClaim("u1")
				if err != nil {
					if !errors.Is(err, ErrBusy) {
						t.Error(err)
					}
					continue
				}
				taken.Add(1)
				if inside.Add(1) != 1 {
					t.Error("two hold the lock")
				}
				inside.Add(-1)
				release()
			}
		})
	}
	wg.Wait()
	if taken.Load() == 0 {
		t.Error("nobody has got it")
	}
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
	if len(a.taken)+len(b.taken) != 0 {
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
		claimtest.WantError(t, err, "GPU "+pciB+" is busy ")
		if elsewhere := l == b; errors.Is(err, ErrElsewhere) != elsewhere || l.elsewhere(gpuLock(pciB)) != nil != elsewhere {
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
		waiter := ask(t, a, pciA, pciB)
		letGo, gaveUp := makeCall(t, a, pciB, call.SlowAfter)
		if waiter.got() != nil {
			t.Error("a call is out whose caller waits for it")
		}
		var out *gpu.PendingError
		if err := <-gaveUp; !errors.As(err, &out) {
			t.Fatal(err)
		}
		time.Sleep(poll)
		if got := waiter.got(); got == nil || !errors.As(got.err, &out) {
			t.Errorf("waiter: got %+v", got)
		}
		for range 2 { // while the lock is held, and when its holder has left
			_, err := a.GPUs(t.Context(), []string{pciB})
			claimtest.WantError(t, err, "GPU "+pciB+" is not used", "nvmlSomething on GPU "+pciB)
			if _, err := try(a, pciB); !errors.As(err, &out) {
				t.Errorf("try: got %v", err)
			}
			if _, err := try(b, pciB); !errors.Is(err, ErrBusy) || b.elsewhere(gpuLock(pciB)) == nil || a.elsewhere(gpuLock(pciB)) != nil {
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
		letGo()
		for _, l := range []*Locks{a, b} {
			mustTake(t, l, pciB)()
		}
	})
}

// TestWaiterHearsOfHungCall: who waits for a GPU hears of a call on it that is slow as soon as its holder does.
func TestWaiterHearsOfHungCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := twoProcesses(t)
		release := mustTake(t, l, pciA)
		letGo, gaveUp := makeCall(t, l, pciA, call.SlowAfter)
		waiter := ask(t, l, pciA)
		if err := <-gaveUp; err == nil {
			t.Error("the call has an answer")
		}
		release()
		if got := waiter.got(); got == nil || !gpu.IsPending(got.err) {
			t.Errorf("got %+v", got)
		}
		letGo()
	})
}

// TestSlowCallBecomesHung: a call whose caller gave up early is slow at first, and hung when others are.
func TestSlowCallBecomesHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := twoProcesses(t)
		letGo, gaveUp := makeCall(t, l, pciA, call.SlowAfter)
		if err := <-gaveUp; err == nil {
			t.Error("the call has an answer")
		}
		for _, want := range []error{gpu.ErrSlow, gpu.ErrHung} {
			if _, err := try(l, pciA); !errors.Is(err, want) || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want that it %v", err, want)
			}
			time.Sleep(call.DefaultLimit)
		}
		letGo()
		mustTake(t, l, pciA)()
	})
}

// TestNoGPUs: asking for the locks of no GPUs succeeds at once, whichever GPUs are locked.
func TestNoGPUs(t *testing.T) {
	a, b := twoProcesses(t)
	defer mustTake(t, a, pciA)()
	release, err := b.GPUs(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	release()
}

func TestTryClaim(t *testing.T) {
	a, b := twoProcesses(t)
	release, err := a.Claim(t.Context(), "u1")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []*Locks{a, b} {
		if got, err := l.TryClaim("u1"); !errors.Is(err, ErrBusy) || got != nil {
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

// TestCallThatIsNotSlowIsWaitedFor: a look at a GPU that takes a second only leaves a call of three behind, for example while
// the driver changes the MIG mode of another GPU. Claims wait for the call as for another claim.
func TestCallThatIsNotSlowIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := twoProcesses(t)
		release := mustTake(t, a, pciA)
		letGo, gaveUp := makeCall(t, a, pciA, time.Second)
		if err := <-gaveUp; err == nil {
			t.Error("the call has an answer")
		}
		release()
		if _, err := try(b, pciA); !errors.Is(err, ErrBusy) || b.elsewhere(gpuLock(pciA)) == nil {
			t.Errorf("other process: got the lock, or %v", err)
		}
		waiter := ask(t, a, pciA)
		time.Sleep(time.Second)
		if got := waiter.got(); got != nil {
			t.Fatalf("got %+v", got)
		}
		letGo()
		time.Sleep(poll)
		got := waiter.got()
		if got == nil || got.err != nil {
			t.Fatalf("got %+v", got)
		}
		got.release()
		mustTake(t, b, pciA)()
	})
}

// TestAlone: other processes are seen as long as they live.
func TestAlone(t *testing.T) {
	dir := t.TempDir()
	l, err := New(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !l.Alone() {
		t.Error("there is no other process")
	}
	other, err := New(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	if l.Alone() || other.Alone() {
		t.Error("there is another process")
	}
	if err := other.folder.Close(); err != nil { // as the kernel does when it has ended
		t.Fatal(err)
	}
	if !l.Alone() {
		t.Error("the other process has ended")
	}
}
