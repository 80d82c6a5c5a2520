// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import "time"

// backoff delays the restarts of a session that fails again and again.
type backoff struct {
	// first follows the second failure in a row, and doubles up to longest.
	first, longest time.Duration
	// failures in a row.
	failures int
	next     time.Time
	// urgent: a caller waits, so there is no delay.
	urgent bool
}

// failed counts a failed start.
func (b *backoff) failed() {
	b.failures++
	delay := time.Duration(0)
	if b.failures > 1 {
		// 16 doublings reach any sensible longest delay.
		delay = min(b.longest, b.first<<min(b.failures-2, 16))
	}
	b.next = time.Now().Add(delay)
}

// ended counts the end of what ran as a failure: the first one, if it ran for long.
func (b *backoff) ended(runningSince time.Time) {
	if time.Since(runningSince) > b.longest {
		b.failures = 0
	}
	b.failed()
}

// delay returns how long the next start is put off.
func (b *backoff) delay() time.Duration {
	if b.urgent {
		return 0
	}
	return max(0, time.Until(b.next))
}
