// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claimstatus

import (
	"errors"
	"fmt"
	"testing"
)

// TestOlderInstanceIsTold: an older instance that is told something new does not write it over what a
// newer one has written, not even once: the newer one would not notice for an hour.
func TestOlderInstanceIsTold(t *testing.T) {
	t.Parallel()
	const rounds = 20
	for round := range rounds {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			ref := r.claim("c", "a")
			older, stopOlder := r.start()
			older.Set([]Claim{ready(ref, "a")})
			r.untilEntries("c", entryA)
			newer, _ := r.start()
			newer.Set([]Claim{ready(ref, "a").lost()})
			r.untilEntries("c", entryLost)
			again := ready(ref, "a")
			again.Devices[0].Message = "still well"
			older.Set([]Claim{again})
			r.until("older instance", func() error {
				older.mu.Lock()
				defer older.mu.Unlock()
				if older.mine {
					return errors.New("it takes itself for the newest")
				}
				return nil
			})
			stopOlder()
			if n := r.api.StatusWrites(FieldManager); n != 2 {
				t.Errorf("%d writes, want one of each instance", n)
			}
		})
	}
}
