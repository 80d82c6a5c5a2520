// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestReads: a read that does not end holds up the first who asks for the limit, and others no longer.
func TestReads(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r reads[int]
		stuck := make(chan struct{})
		calls := 0
		hang := func() (int, error) {
			calls++
			<-stuck
			return 1, nil
		}
		for _, want := range []time.Duration{time.Second, 0, 0} {
			began := time.Now()
			if _, err := r.do(time.Second, hang); !errors.Is(err, errNoAnswer) || time.Since(began) != want {
				t.Errorf("%v after %s, want that after %s", err, time.Since(began), want)
			}
		}
		time.AfterFunc(time.Second, func() { close(stuck) })
		if got, err := r.do(time.Hour, hang); got != 1 || err != nil || calls != 1 {
			t.Errorf("it answers at last: %d, %v, %d reads", got, err, calls)
		}
		failed := errors.New("gone")
		if _, err := r.do(time.Second, func() (int, error) { return 0, failed }); !errors.Is(err, failed) {
			t.Errorf("afterwards: %v", err)
		}
	})
}
