// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package healthsocket

import (
	"context"
	"time"

	"golang.org/x/sync/singleflight"
)

// timeout bounds a check: one that hangs is a failure.
const timeout = 5 * time.Second

// check runs once at a time. Who asks while it runs gets the same answer, so one that
// hangs does not add up.
type check struct {
	run   func(context.Context) error
	group singleflight.Group
}

// answer ends with the server's context, or in time. The check does not know who asked.
func (c *check) answer(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answer := c.group.DoChan("", func() (any, error) {
		// It must not end with who asked first.
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return nil, c.run(ctx)
	})
	select {
	case result := <-answer:
		return result.Err
	case <-bounded.Done():
		return bounded.Err()
	}
}
