// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestBeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		beat := NewBeat()
		var none Beat
		for _, test := range []struct{ after, period, want time.Duration }{
			{0, 10 * time.Second, 10 * time.Second},
			{3 * time.Second, 10 * time.Second, 7 * time.Second},
			{3 * time.Second, 2 * time.Second, time.Second},
			{10*time.Second - 1, 10 * time.Second, 1},
			{10 * time.Second, 10 * time.Second, 10 * time.Second},
			{25 * time.Second, 10 * time.Second, 5 * time.Second},
			{25 * time.Second, 30 * time.Second, 5 * time.Second},
		} {
			time.Sleep(test.after - time.Since(beat.began))
			if got := beat.Next(test.period); got != test.want {
				t.Errorf("after %s the next of each %s is in %s, want %s", test.after, test.period, got, test.want)
			}
			if got := none.Next(test.period); got != test.period {
				t.Errorf("without a beat the next of each %s is in %s", test.period, got)
			}
		}
	})
}
