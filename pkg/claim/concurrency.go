// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"sync"

	"github.com/partage-dev/partage/pkg/panics"
)

// concurrently calls do for all numbers below n at the same time, and returns the errors
// by number. A panic is the error of its call only.
func concurrently(ctx context.Context, n int, do func(i int) error) []error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			defer panics.Recover(ctx, &errs[i])
			errs[i] = do(i)
		})
	}
	wg.Wait()
	return errs
}
