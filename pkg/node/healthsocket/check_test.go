// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package healthsocket

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/test/must"
)

// TestFlood: however many ask, one check runs at a time, and those that come while it
// runs share its answer.
func TestFlood(t *testing.T) {
	const askers = 500
	synctest.Test(t, func(t *testing.T) {
		var calls, now atomic.Int32
		s := newServer(Checks{Readiness: func(context.Context) error {
			calls.Add(1)
			if n := now.Add(1); n > 1 {
				t.Errorf("%d checks at once", n)
			}
			time.Sleep(time.Second)
			now.Add(-1)
			return errors.New("not yet")
		}})
		var wg sync.WaitGroup
		for range askers {
			wg.Go(func() {
				if err := s.answer(t.Context(), Readiness); err == nil || err.Error() != "not yet" {
					t.Errorf("got %v", err)
				}
			})
		}
		wg.Wait()
		if calls.Load() != 1 {
			t.Errorf("%d checks for %d that asked at the same time", calls.Load(), askers)
		}
	})
}

// TestAnswerIsNew: a check that began before is shared, one that has ended is not.
func TestAnswerIsNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var state error
		s := newServer(Checks{Readiness: func(context.Context) error { return state }})
		for _, state = range []error{errors.New("not yet"), nil, errors.New("lost")} {
			if err := s.answer(t.Context(), Readiness); !errors.Is(err, state) {
				t.Errorf("with %v: got %v", state, err)
			}
		}
	})
}

// TestHangingCheck: a check that does not even heed its context is a failure in time,
// and leaves one goroutine behind, not one for each that asked.
func TestHangingCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int32
		end := make(chan struct{})
		s := newServer(Checks{Liveness: func(context.Context) error {
			calls.Add(1)
			<-end
			return nil
		}})
		const askers = 20
		for range askers {
			began := time.Now()
			if err := s.answer(t.Context(), Liveness); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
			if took := time.Since(began); took != hangs {
				t.Errorf("the answer took %s", took)
			}
		}
		if calls.Load() != 1 {
			t.Errorf("%d checks hang after %d asked", calls.Load(), askers)
		}
		close(end)
		synctest.Wait()
		if err := s.answer(t.Context(), Liveness); err != nil {
			t.Errorf("after its end: got %v", err)
		}
	})
}

// TestSlowCheck: who asks gets the reason of a check that gives up in time, and not just that it took
// too long.
func TestSlowCheck(t *testing.T) {
	const rounds = 100 // of two events at the same time either may be seen first
	for range rounds {
		synctest.Test(t, func(t *testing.T) {
			reason := errors.New("the supervisor does not answer")
			s := newServer(Checks{Liveness: func(ctx context.Context) error {
				<-ctx.Done()
				return reason
			}})
			if err := s.answer(t.Context(), Liveness); !errors.Is(err, reason) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestImpatient: who asked first and went away does not take the answer from others.
func TestImpatient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(Checks{Liveness: func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(2 * time.Second):
				return nil
			}
		}})
		theirs, ours := net.Pipe()
		go s.handle(t.Context(), theirs)
		must.Get(ours.Write([]byte(Liveness + "\n")))(t)
		synctest.Wait()
		must.Do(t, ours.Close())
		if err := s.answer(t.Context(), Liveness); err != nil {
			t.Errorf("got %v", err)
		}
	})
}
