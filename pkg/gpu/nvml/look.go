// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// look is a goroutine that makes several calls on one lane, one after the other. Each of them has
// the limit of a call. With a goroutine and a timer for each call, waking up threads would cost an
// idle process more than the calls do.
type look struct {
	lane *lane
	// returned gets the code of the call that was left behind.
	returned chan nvml.Return

	mu sync.Mutex
	// call is the one in progress, if there is one, and since when.
	call  string
	since time.Time
	// left says that it was left behind.
	left bool
}

type lookKey struct{}

// lookOn returns the look that a context is for, if its calls are on this lane.
func lookOn(ctx context.Context, l *lane) *look {
	if k, _ := ctx.Value(lookKey{}).(*look); k != nil && k.lane == l {
		return k
	}
	return nil
}

// lookAt is onGPU for an f that makes several calls and changes nothing. If one of them does not
// return in time, f is left behind with it and ends there: what it has found out until then is the
// caller's.
func (s *session) lookAt(ctx context.Context, pci string, f func(context.Context, *handle) error) error {
	return lookAlong(ctx, s.lanes.gpu(pci), func(ctx context.Context) error {
		return s.onGPU(ctx, pci, func(h *handle) error { return f(ctx, h) })
	})
}

// lookAlong runs f, whose calls on the lane share a goroutine. A panic in f is its error, and one in a
// call that of the call.
func lookAlong(ctx context.Context, l *lane, f func(context.Context) error) error {
	k := &look{lane: l, returned: make(chan nvml.Return, 1)}
	answers := make(chan error, 1)
	go func() {
		var err error
		defer func() { answers <- err }()
		defer l.panics.Recover(ctx, &err)
		err = f(context.WithValue(ctx, lookKey{}, k))
	}()
	limit := time.NewTimer(l.limit)
	defer limit.Stop()
	for {
		select {
		case err := <-answers:
			return err
		case <-limit.C:
		}
		hung, rest := k.leave(ctx)
		if hung != nil {
			return hung
		}
		limit.Reset(rest)
	}
}

// leave leaves the call in progress behind if its time is up, or returns when that may be.
func (k *look) leave(ctx context.Context) (*gpu.HungError, time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.call == "" {
		return nil, k.lane.limit
	}
	took := time.Since(k.since)
	if took < k.lane.limit {
		return nil, k.lane.limit - took
	}
	k.left = true
	hung := k.lane.leave(ctx, k.call, k.since, func() nvml.Return { return <-k.returned })
	if k.lane.observe != nil {
		k.lane.observe(ctx, Call{Function: k.call, PCIAddress: k.lane.pci, Took: took, Err: hung})
	}
	return hung, 0
}

// callInLook makes one call in the look's own goroutine, which ends with a call that was left
// behind.
func callInLook[T any](ctx context.Context, k *look, call string, f func() (T, nvml.Return)) (T, error) {
	k.mu.Lock()
	k.call, k.since = call, time.Now()
	k.mu.Unlock()
	a := run(ctx, k.lane, f)
	k.mu.Lock()
	k.call = ""
	left := k.left
	k.mu.Unlock()
	if left {
		k.returned <- a.ret // has room
		runtime.Goexit()
	}
	return a.value, a.failure(call, k.lane.pci)
}
