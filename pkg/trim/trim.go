// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package trim gives back memory that a process has needed to start.
package trim

import (
	"context"
	"runtime/debug"
	"time"
)

// startTime is after how long a process has surely done what it does once, such as a look at all
// that it looks at later.
const startTime = 30 * time.Second

// AfterStart gives the free part of the heap back to the kernel once, when the process has
// started, unless ctx ends before. Go's runtime does that by itself only for a heap that has
// grown, and that of a driver with nothing to do does not grow.
func AfterStart(ctx context.Context) {
	timer := time.NewTimer(startTime)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
		debug.FreeOSMemory()
	}
}
