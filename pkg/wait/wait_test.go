// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := time.Now()
		if err := For(ctx, time.Minute); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 0 {
			t.Errorf("beyond the deadline: %v after %s", err, time.Since(began))
		}
		if err := For(ctx, time.Second); err != nil || time.Since(began) != time.Second {
			t.Errorf("within the deadline: %v after %s", err, time.Since(began))
		}
		time.AfterFunc(time.Second, cancel)
		if err := For(ctx, 30*time.Second); !errors.Is(err, context.Canceled) || time.Since(began) != 2*time.Second {
			t.Errorf("canceled in the middle: %v after %s", err, time.Since(began))
		}
	})
}
