// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package grpchealth

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// TestFlood: however many ask, one check runs at a time, and those that come while it
// runs share its answer.
func TestFlood(t *testing.T) {
	const askers = 500
	synctest.Test(t, func(t *testing.T) {
		var calls, now atomic.Int32
		h := newHealth(Checks{Readiness: func(context.Context) error {
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
				answer, err := h.Check(t.Context(), &healthpb.HealthCheckRequest{Service: Readiness})
				if err != nil || answer.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
					t.Errorf("got %v, %v", answer, err)
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
		h := newHealth(Checks{Readiness: func(context.Context) error { return state }})
		for _, state = range []error{errors.New("not yet"), nil, errors.New("lost")} {
			answer, err := h.Check(t.Context(), &healthpb.HealthCheckRequest{Service: Readiness})
			if serving := answer.GetStatus() == healthpb.HealthCheckResponse_SERVING; err != nil || serving != (state == nil) {
				t.Errorf("with %v: got %v, %v", state, answer, err)
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
		h := newHealth(Checks{Liveness: func(context.Context) error {
			calls.Add(1)
			<-end
			return nil
		}})
		const askers = 20
		for range askers {
			began := time.Now()
			answer, err := h.Check(t.Context(), &healthpb.HealthCheckRequest{})
			if err != nil || answer.GetStatus() != healthpb.HealthCheckResponse_NOT_SERVING {
				t.Errorf("got %v, %v", answer, err)
			}
			if took := time.Since(began); took != timeout {
				t.Errorf("the answer took %s", took)
			}
		}
		if calls.Load() != 1 {
			t.Errorf("%d checks hang after %d asked", calls.Load(), askers)
		}
		close(end)
		synctest.Wait()
		if answer, err := h.Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil || answer.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("after its end: got %v, %v", answer, err)
		}
	})
}

// TestImpatient: who asked first and went away does not take the answer from others.
func TestImpatient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealth(Checks{Liveness: func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(2 * time.Second):
				return nil
			}
		}})
		var wg sync.WaitGroup
		impatient, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wg.Go(func() { _, _ = h.Check(impatient, &healthpb.HealthCheckRequest{}) })
		synctest.Wait()
		if answer, err := h.Check(t.Context(), &healthpb.HealthCheckRequest{}); err != nil || answer.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("got %v, %v", answer, err)
		}
		wg.Wait()
	})
}
