// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// CallLife is more than ten times as long as the kubelet waits for a call. A release is remembered for as long, so that
// older calls must not prepare anything: the machine may have been suspended.
const CallLife = 10 * time.Minute

var (
	// ErrNoRecord means that the claim has no record of this boot.
	ErrNoRecord = errors.New("the claim has no record")
	// ErrOutOfDate refuses a call that is older than the claim's release.
	ErrOutOfDate = errors.New("the claim was released after this call had arrived; the call is out of date")
)

// Store keeps the records of one node. Its methods lock for as long as they take, against other processes too, and nobody
// needs a lock to call them.
type Store struct {
	folder, boot string
	files        Files
	// turn has one place. It is for goroutines, in their order, what the folder's lock is for processes. The rest needs it.
	turn    chan struct{}
	changed chan struct{}
	// unwritten are the times of releases that the disk would not take. Only this process knows them, until a write works.
	unwritten map[types.UID]time.Duration
	// released is when claims were last released, as far as this process knows.
	released map[types.UID]time.Duration
	// Alone reports whether no other process may have calls at work. Optional: only then the files of claims that have nothing any
	// more are removed at once, which each observation reads otherwise, as long as a call may be older.
	Alone func() bool
}

// Open returns the store in the data folder. It makes no file.
func Open(dataDir, boot string, files Files) (*Store, error) {
	if !uidSyntax.MatchString(boot) {
		return nil, fmt.Errorf("records: boot ID %q: want letters, digits and dashes", boot)
	}
	return &Store{
		folder: filepath.Join(dataDir, "records"), boot: boot, files: files,
		turn: make(chan struct{}, 1), changed: make(chan struct{}), unwritten: map[types.UID]time.Duration{}, released: map[types.UID]time.Duration{},
	}, nil
}

// Boot returns the boot that the store was opened in.
func (s *Store) Boot() string { return s.boot }

// Path returns the first name of a claim's record. It has another where a file of that name cannot be read.
func (s *Store) Path(uid types.UID) string { return filepath.Join(s.folder, string(uid)+"."+s.boot) }

// Changed returns a channel that the next change by this process closes.
func (s *Store) Changed() <-chan struct{} {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	return s.changed
}

// wake wakes all who wait for a change.
func (s *Store) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Read returns the record of a claim, if there is none in this boot that of an earlier one, or nil. It fails where there is
// one that cannot be read.
func (s *Store) Read(uid types.UID) (*Record, error) {
	known, unlock, err := s.open(false, uid)
	defer unlock()
	e := known[uid]
	return cmp.Or(e.record, e.before), cmp.Or(err, e.unreadable())
}

// edit changes what is known of a claim, and writes it. Nobody else sees the change before.
func (s *Store) edit(uid types.UID, change func(*entry) error) error {
	if err := CheckUID(uid); err != nil {
		return err
	}
	known, unlock, err := s.open(true, uid)
	defer unlock()
	if err == nil {
		err = change(known[uid])
	}
	if err == nil {
		err = s.write(known[uid])
	}
	if err != nil {
		return fmt.Errorf("record of claim %s: %w", uid, err)
	}
	return nil
}

// Put is Update for a claim that may have no record yet, or one that cannot be read: a copy of r is changed then. A record that
// is older than a release of its claim is refused with ErrOutOfDate.
func (s *Store) Put(r *Record, change func(*Record) error) error {
	return s.edit(r.Claim.UID, func(e *entry) error {
		if r.Arrived < e.released {
			return ErrOutOfDate
		}
		if e.record == nil {
			e.record = r.Clone()
		}
		return change(e.record)
	})
}

// Update changes the record of a claim. It needs no space on the disk where only the state, times and marks change. The
// error wraps ErrNoRecord if there is none. The function must not use the store.
func (s *Store) Update(uid types.UID, change func(*Record) error) error {
	return s.edit(uid, func(e *entry) error {
		if e.record == nil {
			return cmp.Or(e.unreadable(), ErrNoRecord)
		}
		return change(e.record)
	})
}

// Release notes that a call that arrived at that time releases the claim, or wants it released: from then on a record that
// is older than the call reads as Releasing, in all processes. Where the disk refuses it is kept in memory, written is
// false, and the error says why: the caller goes on. A record that cannot be read is not touched.
func (s *Store) Release(uid types.UID, arrived time.Duration) (written bool, err error) {
	if err := CheckUID(uid); err != nil {
		return false, err
	}
	err = s.edit(uid, func(e *entry) error {
		e.released = max(e.released, arrived)
		e.age()
		return nil
	})
	if err != nil {
		s.turn <- struct{}{}
		defer func() { <-s.turn }()
		s.unwritten[uid] = max(s.unwritten[uid], arrived)
		s.wake()
	}
	return err == nil, err
}

// Released reports whether the claim was released by a call that arrived after the given time.
func (s *Store) Released(uid types.UID, since time.Duration) bool {
	known, unlock, _ := s.open(false, uid)
	defer unlock()
	return known[uid].released > since
}

// Clear notes that nothing is left of the claim on a GPU. With the last mark the record goes, and those of earlier boots.
// Where the disk refuses it nobody takes it for cleared: another process may have counted on what the record says.
func (s *Store) Clear(uid types.UID, pciAddress string) error {
	var earlier []file
	err := s.edit(uid, func(e *entry) error {
		if err := e.unreadable(); err != nil {
			return err
		}
		if e.record == nil || e.record.clear(pciAddress) {
			e.record, earlier = nil, e.earlier
		}
		return nil
	})
	for i := range earlier {
		err = errors.Join(err, s.files.Remove(earlier[i].path))
	}
	return err
}

// DropGuard removes the files of a claim that cannot be read, if it has a record or was released since: all that it has is
// written down again, or nothing of it is left.
func (s *Store) DropGuard(uid types.UID) error {
	return s.edit(uid, func(e *entry) (err error) {
		for i := range e.guards {
			if g := &e.guards[i]; e.record != nil || e.released > g.head.arrived {
				err = errors.Join(err, s.files.Remove(g.path))
			}
		}
		return err
	})
}

// Sweep writes what could not be written, and removes what says only when a claim was released once no call can be older,
// and what earlier boots and killed processes have left besides records.
func (s *Store) Sweep(now time.Duration) error {
	known, unlock, err := s.open(true)
	defer unlock()
	if err != nil {
		return err
	}
	maps.DeleteFunc(s.released, func(_ types.UID, at time.Duration) bool { return now-at >= CallLife })
	unfinished, err := filepath.Glob(filepath.Join(s.folder, ".*.tmp")) // nobody else is writing
	for _, path := range unfinished {
		err = errors.Join(err, s.files.Remove(path))
	}
	for uid, e := range known {
		isOld := e.released > 0 && now-e.released >= CallLife && e.record == nil && len(e.guards) == 0
		if isOld {
			e.released = 0
		}
		if isOld || s.unwritten[uid] > 0 {
			err = errors.Join(err, s.write(e))
		}
		for i := range e.earlier {
			if f := &e.earlier[i]; isOld || f.record == nil {
				err = errors.Join(err, s.files.Remove(f.path))
			}
		}
	}
	return err
}
