// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/partition"
)

// neighbours are the other claims of this boot. What they say of a GPU stays true
// as long as its lock is held, except that a claim may begin to be released.
type neighbours struct {
	records []*Record
	// unclear are the files of claims of which nothing is known.
	unclear []string
}

func (m *Manager) neighbours(r *Record) (*neighbours, error) {
	all, unreadable, err := m.journal.list()
	if err != nil {
		return nil, err
	}
	quarantined, err := m.journal.quarantine.files(r.BootID)
	if err != nil {
		return nil, err
	}
	n := &neighbours{unclear: append(quarantined, unreadable...)}
	for _, other := range all {
		// Nothing survives a reboot.
		if other.Claim.UID != r.Claim.UID && other.BootID == r.BootID {
			n.records = append(n.records, other)
		}
	}
	return n, nil
}

// holders are those that may use what they have. One that is being released uses
// nothing any more, so that of two that are released at the same time each may be
// the last.
func (n *neighbours) holders() []*Record {
	var holders []*Record
	for _, r := range n.records {
		if r.State != Unpreparing {
			holders = append(holders, r)
		}
	}
	return holders
}

// sharers are the other shares of a device, among these claims.
func (d *DeviceRecord) sharers(records []*Record) []owned {
	var found []owned
	if !d.isShare() {
		return nil
	}
	for _, r := range records {
		for i := range r.Devices {
			if other := &r.Devices[i]; !other.Admin && other.Device == d.Device {
				found = append(found, owned{r, other})
			}
		}
	}
	return found
}

// sharedBy tells whether one of these claims has another share of the device.
func (d *DeviceRecord) sharedBy(records []*Record) bool { return len(d.sharers(records)) > 0 }

// heldBy tells whether one of these claims has a device in the session.
func heldBy(records []*Record, id string) bool {
	return slices.ContainsFunc(records, func(r *Record) bool {
		return slices.ContainsFunc(r.Devices, func(d DeviceRecord) bool { return d.in(id) })
	})
}

// mayHave adds to a message whose an instance without record may be.
func (n *neighbours) mayHave() string {
	if len(n.unclear) == 0 {
		return ""
	}
	return fmt.Sprintf("; it may be that of a claim whose journal file cannot be read (%s)", n.unclear[0])
}

// errUnclear: nobody knows who uses something.
var errUnclear = errors.New("it may be used by a claim whose journal file cannot be read")

// checkShared makes sure that the partition that a device is a share of is the one
// that other claims have shares of. When it is gone, they have lost what they had;
// another one in its place would be mistaken for theirs, or for somebody else's.
func (n *neighbours) checkShared(d *DeviceRecord, live partition.Live, found bool) error {
	for _, other := range d.sharers(n.holders()) {
		was := other.Partition.uuid()
		switch {
		case was == "" || found && live.UUID == was:
		case found:
			return fmt.Errorf("partition %s, of which claim %s has a share, is gone and %s is in its place; "+
				"the device can be used again when that claim is released", was, other.record.Claim, live.UUID)
		default:
			return fmt.Errorf("partition %s, of which claim %s has a share, is gone; it is made again when that claim is released",
				was, other.record.Claim)
		}
	}
	return nil
}
