// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/claim/journal"
)

// OverlapError says that a device of a claim uses a part of a GPU that another
// claim holds. The scheduler does not allocate so; this is the last line of
// defence when it is mistaken, or when a pod was deleted by force.
type OverlapError struct {
	Device string
	Other  journal.Ref
	// OtherDevice and OtherState are what the other claim has.
	OtherDevice string
	OtherState  journal.State
	// Shares is how many shares the device has, if too many claims want one: the
	// other claim is one of them. Otherwise 0.
	Shares int
}

func (e *OverlapError) Error() string {
	if e.Shares > 0 {
		return fmt.Sprintf("device %s has %d shares and all are taken, one of them by claim %s", e.Device, e.Shares, e.Other)
	}
	return fmt.Sprintf("device %s overlaps with %s, which is %s for claim %s", e.Device, e.OtherDevice, e.OtherState, e.Other)
}

// Abandoned reports whether no pod can run on what the other claim has: it is being
// released, or it is what a killed process or a failed undoing left.
func (e *OverlapError) Abandoned() bool { return e.OtherState != journal.Prepared }

// checkPlace makes sure that no other claim holds any part of the device's place, and
// that there is a share left. A repeated preparation has both.
func checkPlace(s *Scene, d *journal.Device) error {
	if s.Attempt == Repeated {
		return nil
	}
	for _, other := range s.Others.On(d.PCIAddress) {
		if d.Overlaps(other.Device) {
			return &OverlapError{Device: d.Device, Other: other.Record.Claim, OtherDevice: other.Device.Device, OtherState: other.Record.State}
		}
	}
	if s.Attempt == First {
		return checkShares(s, d)
	}
	return nil
}

// checkShares counts the shares that claims have of a device.
func checkShares(s *Scene, d *journal.Device) error {
	limit, limited := s.MaxShares[d.Device]
	others := d.Sharers(s.Others.Holders())
	if !limited || d.Admin {
		return nil
	}
	own := slices.DeleteFunc(d.Sharers([]*journal.Record{s.Record}), func(h journal.Held) bool { return h.Key() > d.Key() })
	if len(others)+len(own)+1 <= limit {
		return nil
	}
	if len(others) == 0 {
		return fmt.Errorf("the claim is allocated %d shares of it, and it has %d", len(own)+1, limit)
	}
	other := others[max(0, slices.IndexFunc(others, func(h journal.Held) bool { return h.Record.State != journal.Prepared }))]
	return &OverlapError{
		Device: d.Device, Other: other.Record.Claim, OtherDevice: other.Device.Device, OtherState: other.Record.State, Shares: limit,
	}
}
