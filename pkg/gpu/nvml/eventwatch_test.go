// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"
	"time"
)

// TestEventTimeout: waits for events are shorter than what makes a call hang.
func TestEventTimeout(t *testing.T) {
	for name, test := range map[string]struct {
		more        bool
		limit, want time.Duration
	}{
		"usual":                  {limit: time.Minute, want: eventWait},
		"a short limit of calls": {limit: time.Second, want: time.Second / 2},
		"after an event":         {more: true, limit: time.Minute, want: eventMore},
	} {
		t.Run(name, func(t *testing.T) {
			w := &eventWatch{client: New(Options{}), more: test.more}
			if got := w.timeout(test.limit); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}
