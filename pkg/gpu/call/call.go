// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package call makes calls that may never return: into the NVIDIA driver, of its files and its
// programs. Nothing of that can be cancelled, so that callers stop waiting instead.
//
// A call belongs to a GPU, or to none, and waits in that queue until the earlier ones have
// returned. It is answered, failed, slow (it has not returned after SlowAfter) or hung (after the
// limit). Its caller waits for that, or until its context ends and a moment longer, whichever is first. A call that
// nobody waits for any more keeps its place until it returns: it may still take effect. The error is then a
// gpu.PendingError, which says when that is over.
//
// The driver has locks for all GPUs. So a call is called hung only if no call on another GPU was made
// before and is still out: that one keeps it from returning, as far as can be told. Of calls that were made at
// the same moment any may be that one, and all are called hung.
package call

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/panics"
)

const (
	// SlowAfter is how long a call may take that is not slow: up to 4 s to change the MIG mode, and up
	// to 10 s to find a partition under load.
	SlowAfter = 10 * time.Second
	// DefaultLimit is how long a call may take that is not hung. The driver itself gives up waiting
	// for a GPU's firmware after 45 s.
	DefaultLimit = 50 * time.Second

	// grace is how long a caller waits on after its deadline, for which somebody may wait for its answer, and
	// whileCancelled after it was cancelled. Nearly all calls return within that, so that a pod that is deleted does
	// not take its GPU from others.
	grace          = time.Second
	whileCancelled = SlowAfter
	// moment is how far apart two calls may be made and still reach the driver in the opposite order.
	moment = time.Second
	// explains is how long after a call that holds a lock of the driver all GPUs are stuck. A call that
	// was made later hangs for another reason.
	explains = time.Minute
)

// Do waits in a queue and makes a call of f in a goroutine of its own. The error is that of f; a
// *gpu.PendingError if f has not returned; one that wraps that of the call ahead if f was not called for it;
// or a *gpu.Error that wraps that of ctx, if ctx was done before.
//
// f must not write to what its caller reads: results go through its return values.
func Do[T any](ctx context.Context, q *Queue, name string, f func() (T, error)) (T, error) {
	return do(ctx, q, name, f, true)
}

// ErrNoAnswer means that a read has not ended in time.
var ErrNoAnswer = errors.New("no answer")

// Read is Do for what changes nothing, so that nobody has to wait until it is over: it returns when ctx ends, and
// its error is not that of a pending call but wraps ErrNoAnswer.
func Read[T any](ctx context.Context, q *Queue, name string, f func() (T, error)) (T, error) {
	value, err := do(ctx, q, name, f, false)
	if gpu.IsPending(err) {
		err = fmt.Errorf("%w: %v", ErrNoAnswer, err) //nolint:errorlint // whoever asks would wait for it
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", err, ctx.Err())
		}
	}
	return value, err
}

// do waits a moment longer than ctx where a call changes something.
func do[T any](ctx context.Context, q *Queue, name string, f func() (T, error), changes bool) (T, error) {
	var value, none T
	c, err := q.enter(ctx, name)
	if err != nil {
		return none, err
	}
	var failure error
	go func() {
		value, failure = run(ctx, q, name, f)
		q.leave(ctx, c, failure)
	}()
	if err := q.abandon(c, c.wait(ctx, changes)); err != nil {
		return none, err
	}
	return value, failure // nobody writes them any more
}

// run makes a call. A panic in it must not end the work on the other GPUs.
func run[T any](ctx context.Context, q *Queue, name string, f func() (T, error)) (value T, err error) {
	defer func() {
		if errors.Is(err, panics.ErrDefect) {
			err = &gpu.Error{Call: name, PCIAddress: q.PCIAddress, Text: err.Error(), Err: err}
		}
	}()
	defer q.panics.Recover(ctx, &err)
	return f()
}

// wait waits until a call has returned or may be waited for no longer, and returns the error of ctx if that ended it.
func (c *inFlight) wait(ctx context.Context, changes bool) error {
	select {
	case <-c.done:
		return nil
	case <-c.hung:
		return nil
	case <-ctx.Done():
	}
	more := grace
	switch {
	case !changes:
		more = 0
	case errors.Is(ctx.Err(), context.Canceled):
		more = whileCancelled
	}
	select {
	case <-c.done:
	case <-c.hung:
	case <-time.After(more):
	}
	return ctx.Err()
}
