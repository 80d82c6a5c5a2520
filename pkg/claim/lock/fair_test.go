// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/partage-dev/partage/pkg/gpu"
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

func mustTake(t *testing.T, l *Locks, address string) func() {
	t.Helper()
	release, err := l.TryGPU(address)
	if err != nil || release == nil {
		t.Fatalf("GPU %s: not free, %v", address, err)
	}
	return release
}

// overtake makes a waiter for A and B that nobody may overtake any more. A is held.
func overtake(t *testing.T, l *Locks) (waiter request, releaseA func()) {
	t.Helper()
	releaseA = mustTake(t, l, pciA)
	waiter = ask(t, l, pciA, pciB)
	for range maxOvertaken {
		mustTake(t, l, pciB)()
	}
	if waiter.got() != nil {
		t.Fatal("the waiter has locks that are not free")
	}
	return waiter, releaseA
}

// TestOvertakenWaiterComesFirst shows that traffic on one GPU does not starve a caller
// that waits for two.
func TestOvertakenWaiterComesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, _ := twoProcesses(t)
		waiter, releaseA := overtake(t, l)
		if release, err := l.TryGPU(pciB); release != nil || err != nil {
			t.Fatalf("overtaken once more, %v", err)
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

// TestGivingUpLetsOthersIn shows that those who waited behind an overtaken waiter get
// their locks as soon as it stops waiting, for either reason.
func TestGivingUpLetsOthersIn(t *testing.T) {
	for name, stop := range map[string]func(*Locks, request) error{
		"cancelled": func(_ *Locks, waiter request) error {
			waiter.cancel()
			return context.Canceled
		},
		"call hangs": func(l *Locks, _ request) error {
			_ = l.Watch(pciA, &gpu.PendingError{Call: "create", Done: make(chan struct{})})
			return gpu.ErrHung
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, _ := twoProcesses(t)
				waiter, _ := overtake(t, l)
				newer := ask(t, l, pciB)
				if newer.got() != nil {
					t.Fatal("a newer waiter came first")
				}
				want := stop(l, waiter)
				if got := waiter.got(); got == nil || !errors.Is(got.err, want) {
					t.Errorf("the waiter has %+v, want %v", got, want)
				}
				if got := newer.got(); got == nil || got.err != nil {
					t.Errorf("the newer waiter has %+v", got)
				}
			})
		})
	}
}

// TestWatch shows which GPUs an error keeps from use.
func TestWatch(t *testing.T) {
	hung := func(address string) error {
		return &gpu.PendingError{Call: "create", PCIAddress: address, Done: make(chan struct{})}
	}
	wrapped := func(err error) error { return errors.Join(errors.New("undo"), err) }
	for name, test := range map[string]struct {
		address string
		err     error
		want    []string
	}{
		"no error":         {},
		"other error":      {pciA, gpu.ErrLost, nil},
		"the call's GPU":   {"", hung(pciB), []string{pciB}},
		"the given GPU":    {pciA, hung(pciB), []string{pciA}},
		"wrapped":          {pciA, wrapped(wrapped(hung(""))), []string{pciA}},
		"calls on several": {"", errors.Join(hung(pciA), wrapped(hung(pciC))), []string{pciA, pciC}},
	} {
		t.Run(name, func(t *testing.T) {
			l, _ := twoProcesses(t)
			if got := l.Watch(test.address, test.err); !errors.Is(got, test.err) {
				t.Errorf("got %v, want the same error", got)
			}
			var kept []string
			for _, address := range []string{pciA, pciB, pciC} {
				release, err := l.TryGPU(address)
				if err != nil {
					if !errors.Is(err, gpu.ErrHung) {
						t.Error(err)
					}
					kept = append(kept, address)
					continue
				}
				release()
			}
			if len(kept) != len(test.want) {
				t.Fatalf("kept from use: %v, want %v", kept, test.want)
			}
			for i := range kept {
				if kept[i] != test.want[i] {
					t.Errorf("kept from use: %v, want %v", kept, test.want)
				}
			}
		})
	}
}
