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

func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		third := func() (bool, error) { calls++; return calls == 3, nil }
		if err := Until(t.Context(), third); err != nil || calls != 3 {
			t.Errorf("third call: %v after %d calls", err, calls)
		}
		failure := errors.New("out of luck")
		if err := Until(t.Context(), func() (bool, error) { return false, failure }); !errors.Is(err, failure) {
			t.Errorf("failure: %v", err)
		}
		cause := errors.New("too late")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, cause)
		defer cancel()
		if err := Until(ctx, func() (bool, error) { return false, nil }); !errors.Is(err, cause) {
			t.Errorf("never: %v", err)
		}
		if err := Until(ctx, func() (bool, error) { return true, nil }); err != nil {
			t.Errorf("true although ctx is done: %v", err)
		}
	})
}
