// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

// SinceBoot returns the time since this machine started, suspensions included. It is
// the same for all processes and never goes back.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		// Linux has had this clock since 2.6.39, so there is nothing to handle.
		return 0
	}
	return time.Duration(t.Nano())
}

type arrivalKey struct{}

// Arrived stamps the time at which a call arrived. A Prepare that arrived before
// the claim was released is refused, however long it waited since. Without a
// stamp, Prepare and Unprepare take the time at which they are called.
func Arrived(ctx context.Context) context.Context { return arrivedAt(ctx, SinceBoot()) }

func arrivedAt(ctx context.Context, at time.Duration) context.Context {
	return context.WithValue(ctx, arrivalKey{}, at)
}

// arrival returns when the call arrived, on the clock of SinceBoot.
func arrival(ctx context.Context, now func() time.Duration) time.Duration {
	if at, stamped := ctx.Value(arrivalKey{}).(time.Duration); stamped {
		return at
	}
	return now()
}
