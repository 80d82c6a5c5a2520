// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"fmt"
)

// OverlapError says that a device of a claim uses a part of a GPU that another
// claim holds. The scheduler does not allocate so; this is the last line of
// defence when it is mistaken, or when a pod was deleted by force.
type OverlapError struct {
	Device string
	Other  Ref
	// OtherDevice and OtherState are what the other claim has.
	OtherDevice string
	OtherState  State
}

func (e *OverlapError) Error() string {
	return fmt.Sprintf("device %s overlaps with %s, which is %s for claim %s", e.Device, e.OtherDevice, e.OtherState, e.Other)
}

// abandoned tells whether no pod can run on what the other claim has. While its
// GPU's lock is held by the caller, nobody is at work on it either: it is what a
// killed process or a failed undoing left.
func (e *OverlapError) abandoned() bool { return e.OtherState != Prepared }

// checkOverlap compares a record with those of all other claims. The caller
// holds the locks of all its GPUs, so that what is found stays true.
func (m *Manager) checkOverlap(ctx context.Context, want *Record) error {
	others, err := m.journal.list(ctx)
	if err != nil {
		return err
	}
	for _, other := range others {
		// Nothing survives a reboot.
		if other.Claim.UID == want.Claim.UID || other.BootID != want.BootID {
			continue
		}
		if err := want.checkOverlap(other); err != nil {
			return err
		}
	}
	return nil
}

func (r *Record) checkOverlap(other *Record) error {
	for i := range r.Devices {
		for j := range other.Devices {
			if r.Devices[i].overlaps(&other.Devices[j]) {
				return &OverlapError{
					Device: r.Devices[i].Device, Other: other.Claim,
					OtherDevice: other.Devices[j].Device, OtherState: other.State,
				}
			}
		}
	}
	return nil
}
