// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package wait waits: for some time, or until something is true.
package wait

import (
	"context"
	"time"
)

// For waits for d, or until ctx is done, and then returns the error of ctx.
// It fails at once when ctx would be done before d is over: a caller with
// nothing left to try reports why sooner.
func For(ctx context.Context, d time.Duration) error {
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= d {
		return context.DeadlineExceeded
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

const (
	shortestInterval = 5 * time.Millisecond
	longestInterval  = 100 * time.Millisecond
)

// Until calls done until it returns true or an error, at growing intervals. It
// returns that error, or the cause of ctx when ctx is done first. done is called
// at least once.
func Until(ctx context.Context, done func() (bool, error)) error {
	for interval := shortestInterval; ; interval = min(longestInterval, interval*3/2) {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-time.After(interval):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
