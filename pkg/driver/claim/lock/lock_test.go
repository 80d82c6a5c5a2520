// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/test/claimtest"
	"github.com/partage-dev/partage/test/must"
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
	return must.Get(New(dir, call.New(0)))(t)
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

func wantGivenUp(t *testing.T, gaveUp <-chan error) {
	t.Helper()
	if err := <-gaveUp; err == nil {
		t.Error("the call has an answer")
	}
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
	must.Do(t, before.folder.Close())
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
	release := take(t, a, []string{pciA, pciB})
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
		take(t, l, []string{pciC})()
	}
	release()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.GPUs(cancelled, []string{pciA}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	take(t, b, []string{pciA, pciB, pciC})()
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
				release := take(t, holder, []string{pciB})
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
					take(t, l, []string{pciA})()
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
		release := take(t, a, []string{pciA, pciB})
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
			take(t, l, []string{pciA, pciC})()
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
		wantGivenUp(t, gaveUp)
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
		wantGivenUp(t, gaveUp)
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
	take(t, b, nil)()
}

func TestTryClaim(t *testing.T) {
	a, b := twoProcesses(t)
	release := must.Get(a.Claim(t.Context(), "u1"))(t)
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
		wantGivenUp(t, gaveUp)
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
	l := must.Get(New(dir, nil))(t)
	if !l.Alone() {
		t.Error("there is no other process")
	}
	other := must.Get(New(dir, nil))(t)
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

// request waits for the locks of GPUs in a goroutine of its own.
type request struct {
	cancel context.CancelFunc
	result chan result
}

type result struct {
	release func()
	err     error
}

func ask(t *testing.T, l *Locks, addresses ...string) request {
	ctx, cancel := context.WithCancel(t.Context())
	r := request{cancel: cancel, result: make(chan result, 1)}
	go func() {
		release, err := l.GPUs(ctx, addresses)
		r.result <- result{release, err}
	}()
	synctest.Wait()
	return r
}

// got returns the outcome, or nil while the request waits.
func (r request) got() *result {
	synctest.Wait()
	select {
	case got := <-r.result:
		return &got
	default:
		return nil
	}
}

// try does not wait.
func try(l *Locks, address string) (release func(), err error) {
	w := &waiter{names: []name{gpuLock(address)}}
	_, err = l.take(w)
	return func() { l.release(w.names) }, err
}

// take waits for the locks of GPUs.
func take(t *testing.T, l *Locks, addresses []string) (release func()) {
	t.Helper()
	return must.Get(l.GPUs(t.Context(), addresses))(t)
}

func mustTake(t *testing.T, l *Locks, address string) func() {
	t.Helper()
	release, err := try(l, address)
	if err != nil {
		t.Fatalf("GPU %s: not free, %v", address, err)
	}
	return release
}

// TestNobodyIsStarved shows that traffic on two GPUs, which are never free at the same time, does not starve a caller.
func TestNobodyIsStarved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := twoProcesses(t)
		stop := traffic(t, l, pciA, pciB)
		began := time.Now()
		for range 3 {
			take(t, l, []string{pciA, pciB})()
		}
		if waited := time.Since(began); waited > 3*2*turn {
			t.Errorf("waited for %s", waited)
		}
		stop()
	})
}

// traffic keeps each of these GPUs busy all the time, until it is stopped.
func traffic(t *testing.T, l *Locks, addresses ...string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, address := range slices.Concat(addresses, addresses) {
		all.Go(func() {
			for ctx.Err() == nil {
				if release, err := l.GPUs(ctx, []string{address}); err == nil {
					time.Sleep(time.Second + time.Millisecond)
					release()
				}
			}
		})
		time.Sleep(401 * time.Millisecond)
	}
	return func() {
		cancel()
		all.Wait()
	}
}

// TestWaiterForSlowGPU shows that who waits for a GPU that is slow keeps others from another one for a turn at most.
func TestWaiterForSlowGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := twoProcesses(t)
		releaseA := mustTake(t, l, pciA)
		both := []request{ask(t, l, pciA, pciB), ask(t, l, pciB, pciA)}
		var longest time.Duration
		for range 100 {
			began := time.Now()
			release := take(t, l, []string{pciB})
			longest = max(longest, time.Since(began))
			release()
			time.Sleep(100 * time.Millisecond)
		}
		if longest > turn+2*poll {
			t.Errorf("a claim of GPU B has waited for %s", longest)
		}
		if both[0].got() != nil || both[1].got() != nil {
			t.Error("GPU A is held")
		}
		releaseA()
		for len(both) > 0 {
			time.Sleep(turn)
			both = slices.DeleteFunc(both, func(r request) bool {
				got := r.got()
				if got != nil && got.err == nil {
					got.release()
				}
				return got != nil
			})
		}
	})
}

// preferred makes a waiter for A and B who comes first. A is held.
func preferred(t *testing.T, l *Locks) (waiter request, releaseA func()) {
	t.Helper()
	releaseA = mustTake(t, l, pciA)
	waiter = ask(t, l, pciA, pciB)
	mustTake(t, l, pciB)()
	time.Sleep(turn + 2*poll)
	if waiter.got() != nil {
		t.Fatal("the waiter has locks that are not free")
	}
	return waiter, releaseA
}

// TestWhoHasWaitedComesFirst shows who gets what when somebody has waited for long.
func TestWhoHasWaitedComesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := twoProcesses(t)
		waiter, releaseA := preferred(t, l)
		if _, err := try(l, pciB); !errors.Is(err, ErrBusy) || l.elsewhere(gpuLock(pciB)) != nil {
			t.Fatalf("a newer one came first, %v", err)
		}
		newer := ask(t, l, pciB)
		if newer.got() != nil {
			t.Fatal("a newer waiter came first")
		}
		// What it does not wait for is free.
		mustTake(t, l, pciC)()
		releaseA()
		first := waiter.got()
		if first == nil || first.err != nil {
			t.Fatalf("with all its locks free, the waiter has %+v", first)
		}
		if newer.got() != nil {
			t.Error("two hold one lock")
		}
		first.release()
		second := newer.got()
		if second == nil || second.err != nil {
			t.Fatalf("the newer waiter has %+v", second)
		}
		second.release()
		mustTake(t, l, pciA)()
	})
}

// TestGivingUpLetsOthersIn shows that those who waited behind another one get
// their locks as soon as it stops waiting, for either reason.
func TestGivingUpLetsOthersIn(t *testing.T) {
	for name, stop := range map[string]func(*testing.T, *Locks, request) (end func(), want error){
		"cancelled": func(_ *testing.T, _ *Locks, waiter request) (func(), error) {
			waiter.cancel()
			return func() {}, context.Canceled
		},
		"call hangs": func(t *testing.T, l *Locks, _ request) (func(), error) {
			end, gaveUp := makeCall(t, l, pciA, call.SlowAfter)
			wantGivenUp(t, gaveUp)
			return end, gpu.ErrSlow
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, _ := twoProcesses(t)
				waiter, releaseA := preferred(t, l)
				newer := ask(t, l, pciB)
				if newer.got() != nil {
					t.Fatal("a newer waiter came first")
				}
				end, want := stop(t, l, waiter)
				time.Sleep(2 * poll)
				if got := waiter.got(); got == nil || !errors.Is(got.err, want) {
					t.Errorf("the waiter has %+v, want %v", got, want)
				}
				if got := newer.got(); got == nil || got.err != nil {
					t.Errorf("the newer waiter has %+v", got)
				}
				releaseA()
				end()
			})
		})
	}
}

// TestOffsetsStay: the bytes of locks are a protocol between two versions of the plugin that
// run side by side during an upgrade. With others they would work on the same GPU at the same time.
func TestOffsetsStay(t *testing.T) {
	for n, want := range map[name]int64{
		claimLock("0f2dbd0e-7f5b-4b0e-8f2b-4f6c3b1f6f5a"): 931792883910321804,
		gpuLock("0000:1b:00.0"):                           4450363530803340680,
	} {
		if got := n.offset(); got != want {
			t.Errorf("%s: byte %d, want %d", n, got, want)
		}
	}
}
