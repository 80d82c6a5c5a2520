// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package healthsocket

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/singleflight"
)

const (
	// timeout bounds a check.
	timeout = 5 * time.Second
	// hangs is after how long a check that does not heed that is a failure all the same. One that
	// does knows better what it has waited for, so its own error comes first.
	hangs = timeout + time.Second
)

// check runs once at a time. Who asks while it runs gets the same answer, so one that
// hangs does not add up.
type check struct {
	run   func(context.Context) error
	group singleflight.Group
}

// answer ends with the server's context, or in time. The check does not know who asked.
func (c *check) answer(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, hangs)
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
		return fmt.Errorf("the check does not end: %w", bounded.Err())
	}
}
