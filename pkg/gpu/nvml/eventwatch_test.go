// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/wait"
)

// TestEventTimeout: waits for events end with the beat, in whole milliseconds and never before it.
func TestEventTimeout(t *testing.T) {
	for name, test := range map[string]struct {
		noBeat, more       bool
		after, limit, want time.Duration
	}{
		"no beat":                {noBeat: true, after: 3 * time.Second, limit: time.Minute, want: eventWait},
		"at the beat":            {after: eventWait, limit: time.Minute, want: eventWait},
		"in between":             {after: 3 * time.Second, limit: time.Minute, want: 7 * time.Second},
		"parts of a millisecond": {after: 3*time.Second + 1, limit: time.Minute, want: 7 * time.Second},
		"a short limit of calls": {after: 3 * time.Second, limit: time.Second, want: time.Second / 2},
		"after an event":         {more: true, after: 3 * time.Second, limit: time.Minute, want: eventMore},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var o Options
				if !test.noBeat {
					o.Beat = wait.NewBeat()
				}
				w := &eventWatch{client: New(o), more: test.more}
				time.Sleep(test.after)
				if got := w.timeout(test.limit); got != test.want {
					t.Errorf("got %s, want %s", got, test.want)
				}
			})
		})
	}
}
