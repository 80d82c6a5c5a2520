// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gofrs/flock"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// CallLife is more than ten times as long as the kubelet waits for a call. A release is remembered for as long, so that
	// older calls must not prepare anything: the machine may have been suspended.
	CallLife = 10 * time.Minute

	lockPoll = time.Millisecond
	// lockLimit is a thousand times as long as a process has the lock that is not stopped.
	lockLimit = 5 * time.Second
)

var (
	// ErrNoRecord means that the claim has no record of this boot.
	ErrNoRecord = errors.New("the claim has no record")
	// ErrOutOfDate refuses a call that is older than the claim's release.
	ErrOutOfDate = errors.New("the claim was released after this call had arrived; the call is out of date")
)

// Store keeps the records of one node. Its methods lock for as long as they take, against other
// processes too, and nobody needs a lock to call them.
type Store struct {
	folder, boot string
	files        Files
	// turn has one place. It is for goroutines, in their order, what the folder's lock is for processes, and for what follows.
	turn      chan struct{}
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

// entry is what is known of a claim.
type entry struct {
	uid types.UID
	// file has the record, or says only when the claim was released, or is where that will be.
	file file
	// guards cannot be read. rest says nothing that counts, or is of earlier boots.
	guards, rest []file
	// record is that of the file, or what the disk has not taken in its place, and before that of an earlier boot.
	record, before *Record
	// released is when the claim was last released, or zero.
	released time.Duration
}

// Open returns the store in the data folder. It makes no file.
func Open(dataDir, boot string, files Files) (*Store, error) {
	if !uidSyntax.MatchString(boot) {
		return nil, fmt.Errorf("records: boot ID %q: want letters, digits and dashes", boot)
	}
	return &Store{
		folder: filepath.Join(dataDir, "records"), boot: boot, files: files,
		turn: make(chan struct{}, 1), changed: make(chan struct{}), unwritten: map[types.UID]unwritten{},
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

// lock is the folder's own lock, which takes no space. A folder that is not there is made before something is written, and
// needs no lock to be read. With an error, this process is locked all the same.
func (s *Store) lock(write bool) (unlock func(), err error) {
	s.turn <- struct{}{}
	if write {
		err = os.MkdirAll(s.folder, 0o750)
	}
	lock := flock.New(s.folder, flock.SetFlag(os.O_RDONLY))
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), lockLimit)
		defer cancel()
		_, err = lock.TryLockContext(ctx, lockPoll)
	}
	if err != nil {
		err = fmt.Errorf("lock of the records in %s: %w", s.folder, err)
	}
	if !write && absent(err) {
		err = nil
	}
	return func() { _ = lock.Unlock(); <-s.turn }, err // it fails for a bad descriptor only
}

// open locks the store and reads what is known of a claim, or of all. With an error that is what this process remembers.
func (s *Store) open(write bool, only ...types.UID) (known map[types.UID]*entry, unlock func(), err error) {
	var files []os.DirEntry
	if unlock, err = s.lock(write); err == nil {
		if files, err = os.ReadDir(s.folder); absent(err) {
			err = nil
		}
	}
	paths := map[types.UID][]string{}
	for _, uid := range slices.AppendSeq(only, maps.Keys(s.unwritten)) {
		paths[uid] = nil
	}
	for _, file := range files {
		name, _, isRecord := strings.Cut(file.Name(), ".")
		if uid := types.UID(name); isRecord && CheckUID(uid) == nil {
			paths[uid] = append(paths[uid], filepath.Join(s.folder, file.Name()))
		}
	}
	known = map[types.UID]*entry{}
	for uid, paths := range paths {
		if len(only) == 0 || uid == only[0] {
			known[uid] = s.load(uid, paths)
		}
	}
	return known, unlock, err
}

// load reads the files of a claim.
func (s *Store) load(uid types.UID, paths []string) *entry {
	e := &entry{uid: uid, file: file{path: s.Path(uid)}}
	for n := 1; slices.Contains(paths, e.file.path); n++ {
		e.file.path = fmt.Sprintf("%s.%d", s.Path(uid), n)
	}
	for _, path := range paths {
		f := read(path, uid)
		if f.boot != s.boot {
			e.before = cmp.Or(e.before, f.record)
			e.rest = append(e.rest, f)
			continue
		}
		e.released = max(e.released, f.head.released)
		// Versions that cannot read each other's files may write one each. The youngest record counts.
		if f.err == nil && (e.file.record == nil || f.record != nil && f.record.Arrived > e.file.record.Arrived) {
			f, e.file = e.file, f
		}
		switch {
		case f.record != nil:
			f.err = errors.New("another version of the driver has written a younger one")
			fallthrough
		case f.err != nil:
			e.guards = append(e.guards, f)
		case f.data != nil:
			e.rest = append(e.rest, f)
		}
	}
	u, pending := s.unwritten[uid]
	e.record, e.released = e.file.record, max(e.released, u.released)
	if pending && u.line == e.file.line() {
		if e.record = u.record; u.record != nil {
			e.record = u.record.Clone()
		}
	}
	// A record that is older than the release is being released.
	if e.record != nil && e.record.Arrived < e.released {
		e.record.State = Releasing
	}
	if e.before != nil && e.released > 0 {
		e.before.State = Releasing
	}
	return e
}

// unreadable is why it is not known whether a claim has a record, or nil.
func (e *entry) unreadable() error {
	if e.record != nil || len(e.guards) == 0 {
		return nil
	}
	return fmt.Errorf("%s cannot be read: %w", e.guards[0].path, e.guards[0].err)
}

// releasedSince reports whether a release arrived after a file was last written that cannot be read. If that is not known
// a record counts that was written since.
func (e *entry) releasedSince(guard *file) bool {
	since := guard.head.arrived
	if guard.head.gpus == nil && e.record != nil {
		since = e.record.Arrived
	}
	return e.released > since
}

// edit changes what is known of a claim, and writes it.
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

func (s *Store) write(e *entry) error {
	err := e.file.write(s.files, e.record, e.released)
	if err == nil {
		s.remember(e.uid, unwritten{})
	}
	return err
}

// remember notes what the disk has not taken of a claim, and wakes all who wait for a change.
func (s *Store) remember(uid types.UID, u unwritten) {
	s.unwritten[uid] = u
	if u == (unwritten{}) {
		delete(s.unwritten, uid)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// Read returns the record of a claim, if there is none in this boot that of an earlier one, or
// nil. It fails where there is one that cannot be read.
func (s *Store) Read(uid types.UID) (*Record, error) {
	known, unlock, err := s.open(false, uid)
	defer unlock()
	if err != nil {
		return nil, err
	}
	e := known[uid]
	if err := e.unreadable(); err != nil {
		return nil, err
	}
	return cmp.Or(e.record, e.before), nil
}

// Put is Update for a claim that may have no record yet, or one that cannot be read: the change is
// made to a copy of r then.
func (s *Store) Put(r *Record, change func(*Record) error) error {
	return s.edit(r.Claim.UID, func(e *entry) error {
		if e.record == nil {
			e.record = r.Clone()
		}
		return change(e.record)
	})
}

// Update changes the record of a claim. It needs no space on the disk where only the state, times
// and marks change. The error wraps ErrNoRecord if there is none. The function must not use the
// store.
func (s *Store) Update(uid types.UID, change func(*Record) error) error {
	return s.edit(uid, func(e *entry) error {
		if e.record == nil {
			return cmp.Or(e.unreadable(), ErrNoRecord)
		}
		return change(e.record)
	})
}

// Release notes that a call that arrived at that time releases the claim, or wants it released:
// from then on a record that is older than the call reads as Releasing, in all processes. Where
// the disk refuses it is kept in memory, written is false, and the error says why: the caller goes
// on. A record that cannot be read is not touched.
func (s *Store) Release(uid types.UID, arrived time.Duration) (written bool, err error) {
	if err := CheckUID(uid); err != nil {
		return false, err
	}
	s.turn <- struct{}{}
	u := s.unwritten[uid]
	u.released = max(u.released, arrived)
	s.remember(uid, u)
	<-s.turn
	err = s.edit(uid, func(*entry) error { return nil })
	return err == nil, err
}

// Released reports whether the claim was released by a call that arrived after the given time.
func (s *Store) Released(uid types.UID, since time.Duration) bool {
	known, unlock, _ := s.open(false, uid)
	defer unlock()
	return known[uid].released > since
}

// Clear notes that nothing is left of the claim on a GPU, or anywhere for "". With the last mark
// the record goes, and those of earlier boots. Where the disk refuses it is kept in memory, and the
// error says why: the caller goes on.
func (s *Store) Clear(uid types.UID, pciAddress string) error {
	var rest []file
	err := s.edit(uid, func(e *entry) error {
		if err := e.unreadable(); err != nil {
			return err
		}
		if e.record == nil || e.record.clear(pciAddress) {
			e.record, rest = nil, e.rest
		}
		s.remember(uid, unwritten{released: e.released, line: e.file.line(), record: e.record})
		return nil
	})
	for i := range rest {
		err = errors.Join(err, s.files.Remove(rest[i].path))
	}
	return err
}

// DropGuard removes the files of a claim that cannot be read, if it has a record or was released
// since: all that it has is written down again, or nothing of it is left.
func (s *Store) DropGuard(uid types.UID) error {
	return s.edit(uid, func(e *entry) error {
		var errs []error
		for i := range e.guards {
			if g := &e.guards[i]; e.record != nil || e.releasedSince(g) {
				errs = append(errs, s.files.Remove(g.path))
			}
		}
		return errors.Join(errs...)
	})
}

// Sweep writes what could not be written, and removes what says only when a claim was released
// once no call can be older, and what earlier boots and killed processes have left besides records.
func (s *Store) Sweep(now time.Duration) error {
	known, unlock, err := s.open(true)
	defer unlock()
	if err != nil {
		return err
	}
	unfinished, err := filepath.Glob(filepath.Join(s.folder, ".*.tmp")) // nobody else is writing
	errs := []error{err}
	for _, path := range unfinished {
		errs = append(errs, s.files.Remove(path))
	}
	for _, e := range known {
		errs = append(errs, s.sweep(e, now))
	}
	return errors.Join(errs...)
}

func (s *Store) sweep(e *entry, now time.Duration) error {
	isOld := e.released > 0 && now-e.released >= CallLife && e.record == nil && len(e.guards) == 0
	if isOld {
		e.released = 0
	}
	rest := slices.DeleteFunc(e.rest, func(f file) bool { return f.record != nil && !isOld })
	if _, pending := s.unwritten[e.uid]; isOld || pending || len(rest) > 0 {
		if err := s.write(e); err != nil {
			return err
		}
	}
	var errs []error
	for i := range rest {
		errs = append(errs, s.files.Remove(rest[i].path))
	}
	return errors.Join(errs...)
}
