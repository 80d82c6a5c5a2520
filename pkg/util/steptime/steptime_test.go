// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package steptime

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Work at the same time adds up; a context of another operation adds nothing.
func TestTimes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, times := With(t.Context())
		work := func(ctx context.Context, d time.Duration) {
			defer Of(ctx).Begin(NVML)()
			time.Sleep(d)
		}
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() { work(ctx, time.Second) })
		}
		both.Go(func() { work(context.Background(), time.Minute) })
		other, _ := With(ctx)
		both.Go(func() { work(other, time.Minute) })
		both.Wait()
		if took, ok := times.Took(NVML); took != 2*time.Second || !ok {
			t.Errorf("got %s, %t, want 2s", took, ok)
		}
		if took, ok := times.Took(CDI); took != 0 || ok {
			t.Errorf("what did not happen took %s, %t", took, ok)
		}
	})
}
