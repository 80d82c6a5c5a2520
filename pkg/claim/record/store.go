// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"k8s.io/apimachinery/pkg/types"
)

// CallLife is more than ten times as long as the kubelet waits for a call. A release is remembered for as long, so that older
// calls must not prepare anything: the machine may have been suspended.
const CallLife = 10 * time.Minute

var (
	// ErrNoRecord means that the claim has no record of this boot.
	ErrNoRecord = errors.New("the claim has no record")
	// ErrOutOfDate refuses a call that is older than the claim's release.
	ErrOutOfDate = errors.New("the claim was released after this call had arrived; the call is out of date")
)

// Store keeps the records of one node. Its methods lock for as long as they take, against other
// processes too, and nobody needs a lock to call them.
type Store struct {
	disk disk

	// mu is held while no file is read or written.
	mu        sync.Mutex
	changed   chan struct{}
	unwritten map[types.UID]unwritten
}

// unwritten is what the disk would not take. Only this process knows it, until a write works.
type unwritten struct {
	released time.Duration
	// line is the head of the file that the record, or nil, takes the place of.
	line   string
	record *Record
}

// Open returns the store in the data folder. It makes no file.
func Open(dataDir, boot string, files Files) (*Store, error) {
	if !uidSyntax.MatchString(boot) {
		return nil, fmt.Errorf("records: boot ID %q: want letters, digits and dashes", boot)
	}
	return &Store{
		disk:    disk{folder: filepath.Join(dataDir, "records"), boot: boot, files: files, turn: semaphore.NewWeighted(allShares)},
		changed: make(chan struct{}), unwritten: map[types.UID]unwritten{},
	}, nil
}

// Boot returns the boot that the store was opened in.
func (s *Store) Boot() string { return s.disk.boot }

// Path returns where the record of a claim is.
func (s *Store) Path(uid types.UID) string { return s.disk.path(uid) }

// Changed returns a channel that the next change by this process closes.
func (s *Store) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Read returns the record of a claim, if there is none in this boot that of an earlier one, or
// nil. It fails where there is one that cannot be read.
func (s *Store) Read(uid types.UID) (*Record, error) {
	e, unlock, err := s.find(false, uid)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if e.record == nil && e.err == nil {
		e.record = s.earlier(e)
	}
	return e.record, e.unreadable()
}

// Save writes a record, whatever there was. One that cannot be read is moved aside.
func (s *Store) Save(r *Record) error {
	return s.edit(r.Claim.UID, func(e *entry) error {
		e.record = r
		return s.disk.setAside(e, r.Arrived)
	})
}

// Put is Update for a claim that may have no record yet: the change is made to a copy of r then.
// One that cannot be read is moved aside.
func (s *Store) Put(r *Record, change func(*Record) error) error {
	return s.edit(r.Claim.UID, func(e *entry) error {
		if e.record == nil {
			e.record = r.Clone()
		}
		if err := change(e.record); err != nil {
			return err
		}
		return s.disk.setAside(e, r.Arrived)
	})
}

// Update changes the record of a claim. It needs no space on the disk where only the state, times
// and marks change. The error wraps ErrNoRecord if there is none. The function must not use the
// store.
func (s *Store) Update(uid types.UID, change func(*Record) error) error {
	return s.edit(uid, func(e *entry) error {
		switch {
		case e.err != nil:
			return e.unreadable()
		case e.record == nil:
			return ErrNoRecord
		}
		return change(e.record)
	})
}

// edit changes what is known of a claim, and writes it.
func (s *Store) edit(uid types.UID, change func(*entry) error) error {
	e, unlock, err := s.find(true, uid)
	if err != nil {
		return err
	}
	defer unlock()
	if err = change(e); err == nil {
		err = s.disk.write(e)
	}
	if err != nil {
		return fmt.Errorf("record of claim %s: %w", uid, err)
	}
	s.keep(uid, nil)
	return nil
}

// find locks the store and reads all that is known of a claim.
func (s *Store) find(exclusive bool, uid types.UID) (e *entry, unlock func(), err error) {
	if unlock, err = s.disk.lock(exclusive, uid); err != nil {
		return nil, nil, err
	}
	all, err := s.disk.list()
	if err != nil {
		unlock()
		return nil, nil, err
	}
	return s.load(cmp.Or(all[uid], &entry{uid: uid})), unlock, nil
}

// load reads what is known of a claim whose files were found.
func (s *Store) load(found *entry) *entry {
	e := s.disk.load(found)
	if u := s.kept(e.uid); u != nil {
		e.pending = true
		e.released = max(e.released, u.released)
		if e.err == nil && u.line == e.line() {
			e.record = nil
			if u.record != nil {
				e.record = u.record.Clone()
			}
		}
	}
	e.age()
	return e
}

// earlier returns the record of an earlier boot, or nil.
func (s *Store) earlier(e *entry) *Record {
	for _, path := range e.earlier {
		if r := s.disk.read(path, e.uid).record; r != nil {
			if e.released > 0 {
				r.State = Releasing
			}
			return r
		}
	}
	return nil
}

// kept returns what could not be written of a claim, or nil.
func (s *Store) kept(uid types.UID) *unwritten {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u, found := s.unwritten[uid]; found {
		return &u
	}
	return nil
}

// keep is about to be what kept returns, and wakes all who wait for a change.
func (s *Store) keep(uid types.UID, u *unwritten) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.unwritten, uid)
	if u != nil {
		s.unwritten[uid] = *u
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// write keeps in memory what the disk does not take.
func (s *Store) write(e *entry) error {
	err := s.disk.write(e)
	if err == nil {
		s.keep(e.uid, nil)
		return nil
	}
	s.keep(e.uid, &unwritten{released: e.released, line: e.line(), record: e.record})
	return fmt.Errorf("record of claim %s is not written: %w", e.uid, err)
}

// Release notes that a call that arrived at that time releases the claim, or wants it released:
// from then on a record that is older than the call reads as Releasing, in all processes. Where
// the disk refuses it is kept in memory, written is false, and the error says why: the caller goes
// on. A record that cannot be read is not touched.
func (s *Store) Release(uid types.UID, arrived time.Duration) (written bool, err error) {
	if err := CheckUID(uid); err != nil {
		return false, err
	}
	e, unlock, err := s.find(true, uid)
	if err != nil {
		u := s.kept(uid)
		if u == nil {
			u = &unwritten{}
		}
		u.released = max(u.released, arrived)
		s.keep(uid, u)
		return false, err
	}
	defer unlock()
	if e.released < arrived || e.pending {
		e.released = max(e.released, arrived)
		e.age()
		err = s.write(e)
	}
	return err == nil, err
}

// Released reports whether the claim was released by a call that arrived after the given time.
func (s *Store) Released(uid types.UID, since time.Duration) bool {
	if e, unlock, err := s.find(false, uid); err == nil {
		defer unlock()
		return e.released > since
	}
	u := s.kept(uid)
	return u != nil && u.released > since
}

// Clear notes that nothing is left of the claim on a GPU, or anywhere for "". With the last mark
// the record goes, and those of earlier boots. Where the disk refuses it is kept in memory, and the
// error says why: the caller goes on.
func (s *Store) Clear(uid types.UID, pciAddress string) error {
	e, unlock, err := s.find(true, uid)
	if err != nil {
		return err
	}
	defer unlock()
	if e.err != nil {
		return e.unreadable()
	}
	if e.record != nil {
		e.record.Clear(pciAddress)
		if !e.record.Marked() {
			e.record = nil
		}
		err = s.write(e)
	}
	if e.record == nil {
		err = errors.Join(err, s.disk.remove(e.earlier))
	}
	return err
}

// DropGuard removes the files of a claim that cannot be read, if they were moved aside or the claim
// was released: all that it has is written down again, or nothing of it is left.
func (s *Store) DropGuard(uid types.UID) error {
	e, unlock, err := s.find(true, uid)
	if err != nil {
		return err
	}
	defer unlock()
	paths := e.aside
	if e.err != nil && e.guardReleased() {
		paths = append(paths, e.path)
	}
	err = s.disk.remove(paths)
	s.keep(uid, s.kept(uid))
	return err
}

// Sweep writes what could not be written, and removes what says only when a claim was released
// once no call can be older, and what earlier boots have left besides records.
func (s *Store) Sweep(now time.Duration) error {
	unlock, err := s.disk.lock(true)
	if err != nil {
		return err
	}
	defer unlock()
	all, err := s.disk.list()
	errs := []error{err, s.disk.sweepUnfinished()}
	s.mu.Lock()
	for uid := range s.unwritten {
		if all[uid] == nil && err == nil {
			all[uid] = &entry{uid: uid}
		}
	}
	s.mu.Unlock()
	for _, found := range all {
		errs = append(errs, s.sweep(s.load(found), now))
	}
	return errors.Join(errs...)
}

func (s *Store) sweep(e *entry, now time.Duration) error {
	var errs []error
	isOld := e.released > 0 && now-e.released >= CallLife
	switch {
	case isOld && e.body == nil && e.err == nil && len(e.aside) == 0:
		e.released = 0
		errs = append(errs, s.disk.remove(e.earlier), s.write(e))
	case e.pending, len(e.beside) > 0 && e.err == nil:
		errs = append(errs, s.write(e))
	}
	for _, path := range e.earlier { // nothing that these were about is left
		if s.disk.read(path, e.uid).record == nil {
			errs = append(errs, s.disk.files.Remove(path))
		}
	}
	return errors.Join(errs...)
}
