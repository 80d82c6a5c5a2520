// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package poll waits for a condition with a deadline.
package poll

import (
	"context"
	"fmt"
	"time"
)

const interval = 50 * time.Millisecond

// Until calls check until it returns nil. It gives up after the limit, with the last reason, or when ctx ends.
func Until(ctx context.Context, limit time.Duration, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not within %s", limit))
	defer cancel()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w; last: %w", what, context.Cause(ctx), err)
		case <-tick.C:
		}
	}
}
