// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
)

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
			release, err := l.GPUs(t.Context(), []string{pciA, pciB})
			if err != nil {
				t.Fatal(err)
			}
			release()
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
			release, err := l.GPUs(t.Context(), []string{pciB})
			if err != nil {
				t.Fatal(err)
			}
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
			if err := <-gaveUp; err == nil {
				t.Error("the call has an answer")
			}
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
