// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package wait holds the pause between two attempts.
package wait

import (
	"context"
	"time"
)

// For waits for d, or until ctx is done, and then returns the context's error.
// It fails at once when ctx would be done before d is over: a caller with
// nothing left to try reports why sooner.
func For(ctx context.Context, d time.Duration) error {
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= d {
		return context.DeadlineExceeded
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
