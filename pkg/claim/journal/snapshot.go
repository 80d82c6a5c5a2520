// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// Snapshot is one reading of all records.
//
// It takes no lock: a record is replaced in one piece, and a partition comes or goes
// only under its GPU's lock and while a record says so. What a snapshot says of a GPU
// therefore stays true while the GPU's lock is held, except that a claim may begin to be
// released.
type Snapshot struct {
	// Records are those of this boot. Nothing of another boot survives.
	Records []*Record
	// Earlier are those of other boots.
	Earlier []*Record
	// Unreadable are the files of claims of which little is known.
	Unreadable []Unreadable
}

// Unreadable is a damaged record, or one of another version.
type Unreadable struct {
	Path  string
	Claim types.UID
	scope scope
}

// Snapshot reads all records.
func (s *Store) Snapshot() (*Snapshot, error) {
	uids, err := s.UIDs()
	if err != nil {
		return nil, err
	}
	all := &Snapshot{}
	for _, uid := range uids {
		record, err := s.Read(uid)
		var unreadable *UnreadableError
		switch {
		case errors.As(err, &unreadable):
			all.Unreadable = append(all.Unreadable, Unreadable{Path: unreadable.Path, Claim: uid, scope: unreadable.scope})
		case err != nil:
			all.Unreadable = append(all.Unreadable, Unreadable{Path: s.Path(uid), Claim: uid})
		case record == nil:
		case record.BootID == s.boot:
			all.Records = append(all.Records, record)
		default:
			all.Earlier = append(all.Earlier, record)
		}
	}
	quarantined, err := s.quarantine.list(s.boot)
	if err != nil {
		return nil, err
	}
	for i, path := range quarantined {
		one := Unreadable{Path: path, Claim: quarantinedUID(path)}
		if data, err := os.ReadFile(path); err == nil {
			one.scope = salvage(data)
		}
		all.Unreadable = slices.Insert(all.Unreadable, i, one)
	}
	return all, nil
}

// Others returns the snapshot without what is about a claim.
func (s *Snapshot) Others(uid types.UID) *Snapshot {
	others := *s
	others.Records = slices.DeleteFunc(slices.Clone(s.Records), func(r *Record) bool { return r.Claim.UID == uid })
	others.Unreadable = slices.DeleteFunc(slices.Clone(s.Unreadable), func(one Unreadable) bool { return one.Claim == uid })
	return &others
}

// Holders returns the records of claims that may use what they have. One that is
// being released uses nothing any more, so that of two that are released at the same
// time each may be the last.
func (s *Snapshot) Holders() []*Record {
	var holders []*Record
	for _, r := range s.Records {
		if r.State != Unpreparing {
			holders = append(holders, r)
		}
	}
	return holders
}

// Held is a device of a claim.
type Held struct {
	Record *Record
	*Device
}

// On returns the devices of claims on a GPU.
func (s *Snapshot) On(pciAddress string) []Held {
	var found []Held
	for _, r := range s.Records {
		for i := range r.Devices {
			if d := &r.Devices[i]; d.PCIAddress == pciAddress {
				found = append(found, Held{r, d})
			}
		}
	}
	return found
}

// Sharers returns the shares of the same device that these claims have.
func (d *Device) Sharers(records []*Record) []Held {
	var found []Held
	if !d.IsShare() {
		return nil
	}
	for _, r := range records {
		for i := range r.Devices {
			if other := &r.Devices[i]; other != d && !other.Admin && other.Device == d.Device {
				found = append(found, Held{r, other})
			}
		}
	}
	return found
}

// SharedBy reports whether one of these claims has a share of the same device.
func (d *Device) SharedBy(records []*Record) bool { return len(d.Sharers(records)) > 0 }

// HoldSession reports whether one of these claims has a device in the session.
func HoldSession(records []*Record, id string) bool {
	return slices.ContainsFunc(records, func(r *Record) bool { return r.InSession(id) })
}

// NamesSession reports whether any record names the session.
func (s *Snapshot) NamesSession(id string) bool {
	return slices.ContainsFunc(s.Records, func(r *Record) bool { return r.Session(id) != nil })
}

// MayPartition returns a file that cannot be read and may be that of a claim with a
// partition on the GPU, or nothing.
func (s *Snapshot) MayPartition(pciAddress string) string {
	for _, one := range s.Unreadable {
		if one.scope.mayPartition(pciAddress) {
			return one.Path
		}
	}
	return ""
}

// MayHoldSession returns a file that cannot be read and may be that of a claim in the
// session, or nothing.
func (s *Snapshot) MayHoldSession(id string) string {
	for _, one := range s.Unreadable {
		if one.scope.mayHold(id) {
			return one.Path
		}
	}
	return ""
}

// OfClaimMayPartition reports whether a damaged record of the claim may be about a
// partition on the GPU.
func (s *Snapshot) OfClaimMayPartition(uid types.UID, pciAddress string) bool {
	return slices.ContainsFunc(s.Unreadable, func(one Unreadable) bool {
		return one.Claim == uid && one.scope.mayPartition(pciAddress)
	})
}

// OfClaimMayHaveSessions reports whether a damaged record of the claim may be about any
// session.
func (s *Snapshot) OfClaimMayHaveSessions(uid types.UID) bool {
	return slices.ContainsFunc(s.Unreadable, func(one Unreadable) bool {
		return one.Claim == uid && (!one.scope.known || len(one.scope.sessions) > 0)
	})
}

// Explain adds to a message whose an instance without record may be.
func (s *Snapshot) Explain(pciAddress string) string {
	path := s.MayPartition(pciAddress)
	if path == "" {
		return ""
	}
	return fmt.Sprintf("; it may be that of a claim whose journal file cannot be read (%s)", path)
}
