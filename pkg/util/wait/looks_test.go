// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A look that does not end holds up the first caller for the limit, others no longer, and
// nobody else.
func TestLooks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var looks Looks[string, int]
		stuck := make(chan struct{})
		calls := 0
		hang := func() (int, error) {
			calls++
			<-stuck
			return 1, nil
		}
		for _, want := range []time.Duration{time.Second, 0, 0} {
			began := time.Now()
			if _, err := looks.Do("a", time.Second, hang); !errors.Is(err, ErrNoAnswer) || time.Since(began) != want {
				t.Errorf("%v after %s, want that after %s", err, time.Since(began), want)
			}
		}
		if got, err := looks.Do("b", time.Second, func() (int, error) { return 2, nil }); got != 2 || err != nil {
			t.Errorf("beside it: %d, %v", got, err)
		}
		close(stuck)
		synctest.Wait()
		failed := errors.New("gone")
		if _, err := looks.Do("a", time.Second, func() (int, error) { return 0, failed }); !errors.Is(err, failed) {
			t.Errorf("afterwards: %v", err)
		}
		if calls != 1 {
			t.Errorf("%d looks, want one that all share", calls)
		}
	})
}
