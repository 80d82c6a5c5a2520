// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// besideSuffix is of the file that says when a claim was released whose record cannot be read.
	besideSuffix = ".released"
	asideInfix   = ".unreadable-"
)

// ErrNoRecord means that the claim has no record of this boot.
var ErrNoRecord = errors.New("the claim has no record")

// ErrOutOfDate refuses a call that is older than the claim's release.
var ErrOutOfDate = errors.New("the claim was released after this call had arrived; the call is out of date")

// Store keeps the records of one node. Its methods lock for as long as they take, against other
// processes too, and nobody needs a lock to call them.
type Store struct {
	dataDir, boot, folder string
	files                 Files
	changed               broadcast
	// turn is for goroutines what lockFolder is for processes.
	turn sync.RWMutex

	// mu is held while no file is read or written.
	mu        sync.Mutex
	unwritten map[types.UID]*unwritten
	// parsed are the last contents of files, by path.
	parsed map[string]parsed
}

// parsed is the body of a file. Most do not change from one Snapshot to the next.
type parsed struct {
	body   []byte
	record *Record
}

// Open returns the store in the data folder. It makes no file.
func Open(dataDir, boot string, files Files) (*Store, error) {
	if !uidSyntax.MatchString(boot) {
		return nil, fmt.Errorf("records: boot ID %q: want letters, digits and dashes", boot)
	}
	return &Store{
		dataDir: dataDir, boot: boot, folder: filepath.Join(dataDir, "records", boot), files: files,
		unwritten: map[types.UID]*unwritten{}, parsed: map[string]parsed{},
	}, nil
}

// Boot returns the boot that the store was opened in.
func (s *Store) Boot() string { return s.boot }

// Path returns where the record of a claim is.
func (s *Store) Path(uid types.UID) string { return filepath.Join(s.folder, string(uid)) }

// Changed returns a channel that the next change by this process closes.
func (s *Store) Changed() <-chan struct{} { return s.changed.receive() }

// UnreadableError is a record that cannot be read.
type UnreadableError struct {
	Path string
	Err  error
}

func (e *UnreadableError) Error() string { return fmt.Sprintf("record %s: %v", e.Path, e.Err) }

func (e *UnreadableError) Unwrap() error { return e.Err }

// Read returns the record of a claim, if there is none in this boot that of an earlier one, or
// nil. The error is an *UnreadableError where there is one that cannot be read.
func (s *Store) Read(uid types.UID) (*Record, error) {
	unlock, err := s.lock(uid, unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	defer unlock()
	e := s.load(uid)
	if e.err != nil {
		return nil, &UnreadableError{Path: e.path, Err: e.err}
	}
	if e.record != nil {
		return e.record, nil
	}
	for _, boot := range s.earlierBoots() {
		if f := s.readFile(filepath.Join(filepath.Dir(s.folder), boot, string(uid)), uid, boot); f.written != nil {
			return f.written, nil
		}
	}
	return nil, nil
}

// Save writes a record, in one piece, whatever there was. One that cannot be read is moved aside.
func (s *Store) Save(r *Record) error {
	return s.edit(r.Claim.UID, func(e *entry) (*Record, error) { return r, s.setAside(e, r) })
}

// Put is Update for a claim that may have no record yet: the change is made to a copy of r then.
// One that cannot be read is moved aside.
func (s *Store) Put(r *Record, change func(*Record) error) error {
	return s.edit(r.Claim.UID, func(e *entry) (*Record, error) {
		if e.record == nil {
			e.record = r.Clone()
		}
		if err := change(e.record); err != nil {
			return nil, err
		}
		return e.record, s.setAside(e, r)
	})
}

// Update changes the record of a claim. It needs no space on the disk where only states, times
// and marks change. The error wraps ErrNoRecord if there is none. The function must not use
// the store.
func (s *Store) Update(uid types.UID, change func(*Record) error) error {
	return s.edit(uid, func(e *entry) (*Record, error) {
		switch {
		case e.err != nil:
			return nil, &UnreadableError{Path: e.path, Err: e.err}
		case e.record == nil:
			return nil, ErrNoRecord
		}
		return e.record, change(e.record)
	})
}

func (s *Store) edit(uid types.UID, change func(*entry) (*Record, error)) error {
	unlock, err := s.lock(uid, unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	e := s.load(uid)
	if e.record, err = change(e); err == nil {
		err = s.write(e)
	}
	if err != nil {
		return fmt.Errorf("record of claim %s: %w", uid, err)
	}
	return nil
}

// lock must come before all that follows here, LOCK_EX before what writes.
func (s *Store) lock(uid types.UID, how int) (unlock func(), err error) {
	if err := CheckUID(uid); err != nil {
		return nil, err
	}
	unlock, err = s.lockAll(how)
	if err != nil {
		err = fmt.Errorf("record of claim %s: %w", uid, err)
	}
	return unlock, err
}

func (s *Store) lockAll(how int) (unlock func(), err error) {
	take, give := s.turn.RLock, s.turn.RUnlock
	if how == unix.LOCK_EX {
		take, give = s.turn.Lock, s.turn.Unlock
	}
	take()
	folder, err := lockFolder(s.folder, how)
	if absent(err) && how == unix.LOCK_SH {
		return give, nil // there is nothing to read
	}
	if err != nil {
		give()
		return nil, err
	}
	return func() {
		_ = folder.Close() // nothing was written
		give()
	}, nil
}

// file is one file as it is on the disk. It is absent if it has neither data nor an error.
type file struct {
	path string
	data []byte
	// head has no GPUs where not even that can be read.
	head head
	// written is nil for a file that says only when the claim was released.
	written *Record
	err     error
}

func (s *Store) readFile(path string, uid types.UID, boot string) file {
	f := file{path: path}
	if f.data, f.err = s.files.Read(path); f.err != nil {
		if absent(f.err) {
			f.err = nil
		}
		return f
	}
	var body []byte
	if f.head, body, f.err = parseHead(f.data); f.err != nil || f.head.state == gone {
		return f
	}
	s.mu.Lock()
	known := s.parsed[path]
	s.mu.Unlock()
	if known.record == nil || !bytes.Equal(known.body, body) {
		known.body = body
		if known.record, f.err = parseBody(body, uid, f.head.body); f.err != nil {
			return f
		}
		s.mu.Lock()
		s.parsed[path] = known
		s.mu.Unlock()
	}
	written := known.record.Clone()
	if f.err = f.head.apply(written, boot); f.err == nil {
		f.written = written
	}
	return f
}

// entry is what is known of a claim.
type entry struct {
	uid types.UID
	file
	// record is what was written, with what could not be.
	record *Record
	// released is when the claim was last released, or zero.
	released time.Duration
	// beside means that there is such a file, pending that not all is written.
	beside, pending bool
}

func (s *Store) load(uid types.UID) *entry {
	e := &entry{uid: uid, file: s.readFile(s.Path(uid), uid, s.boot)}
	beside := s.readFile(e.path+besideSuffix, uid, s.boot)
	e.beside = beside.data != nil || beside.err != nil
	e.released = max(e.head.released, beside.head.released)
	if e.written != nil {
		e.record = e.written.Clone()
	}
	s.overlay(e)
	if e.record != nil && e.record.Arrived < e.released {
		e.record.State = Releasing
	}
	return e
}

// write makes the files say what the entry says.
func (s *Store) write(e *entry) error {
	var err error
	stone := head{state: gone, released: e.released}
	switch {
	case e.err != nil:
		err = s.files.Replace(e.path+besideSuffix, stone.line())
	case e.record != nil:
		err = s.writeRecord(e)
	case e.data == nil && e.released > 0:
		err = s.files.Replace(e.path, stone.line())
	case e.data != nil && e.released > 0:
		stone.marks, stone.gpus, stone.arrived = e.head.marks, e.head.gpus, e.head.arrived
		if err = s.files.WriteHead(e.path, stone.line()); err == nil {
			// What is behind the head means nothing now, so that this may fail.
			_ = s.files.Truncate(e.path, int64(len(stone.line())))
		}
	default:
		err = s.files.Remove(e.path)
	}
	if err != nil {
		return err
	}
	if e.beside && e.err == nil {
		_ = s.files.Remove(e.path + besideSuffix) // Sweep tries again
	}
	s.forget(e.uid)
	s.changed.send()
	return nil
}

func (s *Store) writeRecord(e *entry) error {
	if e.record.BootID != s.boot {
		return fmt.Errorf("it is of boot %q, want %q", e.record.BootID, s.boot)
	}
	h, body, err := encode(e.record, e.released)
	if err != nil {
		return err
	}
	if e.written != nil {
		if _, was, err := encode(e.written, 0); err == nil && bytes.Equal(was, body) {
			// What another version wrote stays.
			h.gpus, h.body = e.head.gpus, e.head.body
			return s.files.WriteHead(e.path, h.line())
		}
	}
	return s.files.Replace(e.path, append(h.line(), body...))
}

// setAside moves a record that cannot be read away, and does nothing to others. The new name says
// which releases are about it: those that arrived after it was written, as far as is known.
func (s *Store) setAside(e *entry, next *Record) error {
	if e.err == nil {
		return nil
	}
	since := e.head.arrived
	if since == 0 && e.released == 0 {
		since = next.Arrived
	}
	for n := 1; ; n++ {
		to := fmt.Sprintf("%s%s%d-%d", e.path, asideInfix, since, n)
		_, err := os.Lstat(to)
		if err == nil {
			continue
		}
		if absent(err) {
			err = s.files.Move(e.path, to)
		}
		if err != nil {
			return fmt.Errorf("it cannot be read (%w) and not be moved aside: %w", e.err, err)
		}
		e.file = file{path: e.path}
		return nil
	}
}
