// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import "time"

// repairs slow down putting back what others change.
type repairs struct {
	repairing bool
	last      time.Time
	delay     time.Duration
}

const (
	minRepairDelay, maxRepairDelay = time.Second, 5 * time.Minute
	// repairsForgotten is how long others must have changed nothing for the next
	// repair to be made at once.
	repairsForgotten = 10 * time.Minute
)

// begin returns how long to wait.
func (r *repairs) begin() time.Duration {
	r.repairing = true
	if time.Since(r.last) > repairsForgotten+r.delay {
		r.delay = 0
	}
	return r.delay
}

// done notes whether there was anything to repair.
func (r *repairs) done(wrote bool) {
	if r.repairing && wrote {
		r.last, r.delay = time.Now(), min(max(minRepairDelay, 2*r.delay), maxRepairDelay)
	}
	r.repairing = false
}
