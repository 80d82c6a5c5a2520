// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gofrs/flock"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/host"
)

// Files changes files. Tests inject faults here. A write is seen by all processes at once, also if its own is killed then;
// it need not outlive the machine, since no call waits for the disk.
type Files interface {
	// Replace puts the content in place in one piece.
	Replace(path string, data []byte) error
	// WriteHead writes over the beginning of a file, and takes no space.
	WriteHead(path string, data []byte) error
	// Remove removes what Replace made. An absent file is a success.
	Remove(path string) error
}

// OS is the file system of this machine.
type OS struct{}

// Replace implements Files. Claim names are nobody else's business.
func (OS) Replace(path string, data []byte) error { return host.ReplaceUnsynced(path, data, 0o600) }

// WriteHead implements Files.
func (OS) WriteHead(path string, data []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(data, 0)
	return errors.Join(err, file.Close())
}

// Remove implements Files.
func (OS) Remove(path string) error { return host.RemoveUnsynced(path) }

// file is one file of a claim.
type file struct {
	path string
	// data is nil where there is no file.
	data []byte
	// head has no GPUs where not even that can be read.
	head head
	// record is nil in a file that says only when its claim was released, and with an error. Nobody changes it.
	record *Record
	err    error
}

// entry is what is known of a claim.
type entry struct {
	uid types.UID
	// file has the record, or says only when the claim was released, or is where that will be.
	file file
	// guards cannot be read, and earlier are of earlier boots.
	guards, earlier []file
	// record is that of the file, and before of an earlier boot.
	record, before *Record
	// released is when the claim was last released, or zero.
	released time.Duration
	// drop are files that go before the claim's is written.
	drop []file
}

// age says of a record that is older than the release that it is being released.
func (e *entry) age() {
	if e.record != nil && e.record.Arrived < e.released {
		e.record.State = Releasing
	}
}

// unreadable is why it is not known whether a claim has a record, or nil.
func (e *entry) unreadable() error {
	if e.record != nil || len(e.guards) == 0 {
		return nil
	}
	return fmt.Errorf("%s cannot be read: %w", e.guards[0].path, e.guards[0].err)
}

// isOver reports whether nothing is known of a claim but that it was released, and no call can be older.
func (e *entry) isOver(now time.Duration) bool {
	return e.released > 0 && now-e.released >= CallLife && e.record == nil && len(e.guards) == 0
}

// open locks the store and reads what is known of one claim, or of all. With an error that is no more than which releases this
// process could not write down.
// The lock is the folder's own, which takes no space. A folder that is not there needs none to be read.
func (s *Store) open(write bool, only ...types.UID) (known map[types.UID]*entry, unlock func(), err error) {
	if write {
		err = os.MkdirAll(s.folder, 0o750)
	}
	lock := flock.New(s.folder, flock.SetFlag(os.O_RDONLY))
	if err == nil {
		err = take(lock, &s.stuck)
	}
	var files []os.DirEntry
	if err == nil {
		files, err = os.ReadDir(s.folder)
	}
	if errors.Is(err, fs.ErrNotExist) && !write {
		err = nil
	} else if err != nil {
		err = fmt.Errorf("records in %s: %w", s.folder, err)
	}
	paths := map[types.UID][]string{}
	for _, uid := range slices.Concat(only, s.releases.unwritten()) {
		paths[uid] = nil // perhaps there is no file
	}
	for _, file := range files {
		name, _, isRecord := strings.Cut(file.Name(), ".")
		if uid := types.UID(name); isRecord && CheckUID(uid) == nil {
			paths[uid] = append(paths[uid], filepath.Join(s.folder, file.Name()))
		}
	}
	if len(s.parsed) > len(files) {
		clear(s.parsed) // others have removed some
	}
	known = map[types.UID]*entry{}
	for uid, paths := range paths {
		if len(only) == 0 || uid == only[0] {
			known[uid] = s.load(uid, paths)
		}
	}
	return known, func() { _ = lock.Unlock() }, err // it fails for a bad descriptor only
}

// lockTime is how long the lock is waited for. A process that is not stopped has it for a thousandth of that. Where one has
// kept it for so long, others wait for stuckTime until it was free again.
const (
	lockTime  = 5 * time.Second
	stuckTime = 100 * time.Millisecond
)

// take waits for the lock of the records. stuck is whether another process has kept it when it was last waited for.
func take(lock *flock.Flock, stuck *bool) error {
	limit := lockTime
	if *stuck {
		limit = stuckTime
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	locked, err := lock.TryLockContext(ctx, time.Millisecond)
	if *stuck = !locked && errors.Is(err, context.DeadlineExceeded); *stuck {
		return errors.New("another process keeps them locked")
	}
	return err
}

// parsed are files as they were parsed last, by path. The store's lock guards it.
type parsed map[string]file

// read reads a file, and parses it unless it says what it said before.
func (p parsed) read(path string, uid types.UID, boot string) file {
	f := file{path: path}
	if f.data, f.err = os.ReadFile(path); f.err != nil {
		return f
	}
	if last, known := p[path]; known && bytes.Equal(last.data, f.data) {
		return last
	}
	f.head, f.record, f.err = parse(f.data, uid, boot)
	p[path] = f
	return f
}

// load reads the files of a claim.
func (s *Store) load(uid types.UID, paths []string) *entry {
	e := &entry{uid: uid, file: file{path: s.Path(uid)}}
	for n := 1; slices.Contains(paths, e.file.path); n++ {
		e.file.path = fmt.Sprintf("%s.%d", s.Path(uid), n)
	}
	for _, path := range paths {
		boot := strings.Split(filepath.Base(path), ".")[1]
		f := s.parsed.read(path, uid, boot)
		if boot != s.boot {
			e.before = cmp.Or(e.before, f.record.Clone())
			e.earlier = append(e.earlier, f)
			continue
		}
		e.released = max(e.released, f.head.released)
		// Versions that cannot read each other's files may write one each. The youngest record counts.
		if f.err == nil && (e.file.record == nil || f.record != nil && f.record.Arrived > e.file.record.Arrived) {
			f, e.file = e.file, f
		}
		if f.err != nil || f.record != nil {
			e.guards = append(e.guards, f)
		}
	}
	e.record = e.file.record.Clone()
	e.released = s.releases.learn(uid, e.released)
	e.age()
	if e.before != nil && e.released > 0 {
		e.before.State = Releasing
	}
	return e
}

// keeps reports whether a claim has to have a file: for its record, or for others who must know that it was released.
func (s *Store) keeps(e *entry) bool {
	return e.record != nil || e.released > 0 && (len(e.guards)+len(e.earlier) > 0 || s.Alone == nil || !s.Alone())
}

// write makes the file say what is known of a claim. It needs no space where only the head changes, also if another version
// wrote the body, which may say more.
func (s *Store) write(e *entry) (err error) {
	f := &e.file
	h, body := head{state: gone, released: e.released}, []byte(nil)
	if e.record != nil {
		if h, body, err = encode(e.record, e.released); err != nil {
			return err
		}
	}
	h.writes = f.head.writes + 1
	switch {
	case !s.keeps(e):
		err = s.files.Remove(f.path)
		delete(s.parsed, f.path)
	case e.record == nil && f.data != nil:
		err = s.files.WriteHead(f.path, h.line())
	case e.record != nil && f.record != nil && bytes.Equal(encodeBody(f.record), body):
		h.gpus, h.body = f.head.gpus, f.head.body
		err = s.files.WriteHead(f.path, h.line())
	default:
		err = s.files.Replace(f.path, append(h.line(), body...))
	}
	if err != nil {
		return err
	}
	if e.record != nil {
		s.parsed[f.path] = file{path: f.path, data: append(h.line(), body...), head: h, record: e.record.Clone()}
	}
	s.releases.note(e.uid, e.released, true)
	return nil
}
