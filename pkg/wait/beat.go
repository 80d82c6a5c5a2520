// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package wait

import "time"

// Beat lets what a process does again and again happen at the same moments: to wake up when
// nothing else is to be done costs more than most of that. With the zero value everything
// has times of its own.
type Beat struct {
	began time.Time
}

// NewBeat returns a beat that begins now.
func NewBeat() Beat { return Beat{time.Now()} }

// Next returns how long it is until the next multiple of period since the beat began: more than
// 0 and at most period. A ticker keeps to the beat if it is made with that and reset to it at each
// tick.
func (b Beat) Next(period time.Duration) time.Duration {
	if b.began.IsZero() {
		return period
	}
	return period - time.Since(b.began)%period
}
