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
	one := func(i int) {
		defer panics.Recover(ctx, &errs[i])
		errs[i] = do(i)
	}
	var wg sync.WaitGroup
	for i := 1; i < n; i++ {
		wg.Go(func() { one(i) })
	}
	if n > 0 {
		one(0) // most often it is the only one
	}
	wg.Wait()
	return errs
}
