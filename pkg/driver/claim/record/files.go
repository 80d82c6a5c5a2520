// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gofrs/flock"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/node/host"
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

// file is a file of a claim: its record, or only when it was released.
type file struct {
	path string
	// data is nil where there is no file.
	data []byte
	// head has no GPUs where not even that can be read.
	head head
	// record is nil in a file that says only when its claim was released, and with an error. It is as it was read.
	record *Record
	err    error
}

// lastRelease is what is known of the last release of a claim.
type lastRelease struct {
	// at is when it came, or zero.
	at time.Duration
	// covers is the checksum of the files that could not be read then, or zero.
	covers uint32
	// cleared are the GPUs on which nothing is left that these could be about. Only this process knows.
	cleared []string
	// unwritten means that the disk would not take it: only this process knows of it, until a write works.
	unwritten bool
}

// entry is what is known of a claim.
type entry struct {
	lastRelease
	uid types.UID
	// file has the record, or says only when the claim was released, or is where that will be.
	file file
	// guards cannot be read.
	guards []file
	// record is that of the file. before is that of an earlier boot, as long as the claim was neither released nor prepared since.
	record, before *Record
	// earlier are the files of earlier boots, which go with before, and drop others that go when the claim's is written.
	earlier, drop []file
	// isOver means that nothing has to be known of the release any more.
	isOver bool
}

// sum is the checksum of what the guards say, or zero where that is not known.
func (e *entry) sum() uint32 {
	sum := crc32.NewIEEE()
	for i := range e.guards {
		if e.guards[i].data == nil {
			return 0
		}
		_, _ = fmt.Fprintf(sum, "%s\n%s", filepath.Base(e.guards[i].path), e.guards[i].data)
	}
	return sum.Sum32()
}

// isCovered reports whether the claim was released with the guards as they are: what another version writes later is not about what
// was released.
func (e *entry) isCovered() bool { return e.covers != 0 && e.covers == e.sum() }

// age says of a record that is older than the release that it is being released. Nothing is left of one of an earlier boot.
func (e *entry) age() {
	if e.record != nil && e.record.Arrived < e.at {
		e.record.State = Releasing
	}
	if e.record != nil || e.at > 0 {
		e.before = nil
	}
}

// unreadable is why it is not known whether a claim has a record, or nil.
func (e *entry) unreadable() error {
	if e.record != nil || len(e.guards) == 0 {
		return nil
	}
	return fmt.Errorf("%s cannot be read: %w", e.guards[0].path, e.guards[0].err)
}

// isOld reports whether nothing is known of a claim but that it was released, and no call can be older.
func (e *entry) isOld(now time.Duration) bool {
	return e.at > 0 && now-e.at >= CallLife && e.record == nil && len(e.guards) == 0
}

// open locks the store and reads what is known of one claim, or of all. With an error it knows no file.
// The lock is the folder's own, which takes no space. A folder that is not there needs none to be read. Another process that is
// stopped while it has the lock is a disk that does not answer.
func (s *Store) open(write bool, only ...types.UID) (known map[types.UID]*entry, unlock func(), err error) {
	if write {
		err = os.MkdirAll(s.folder, 0o750)
	}
	lock := flock.New(s.folder, flock.SetFlag(os.O_RDONLY))
	if err == nil {
		err = lock.Lock()
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
	for _, uid := range only {
		paths[uid] = nil // perhaps there is no file
	}
	for _, file := range files {
		name, _, isRecord := strings.Cut(file.Name(), ".")
		if uid := types.UID(name); isRecord && CheckUID(uid) == nil && (len(only) == 0 || uid == only[0]) {
			paths[uid] = append(paths[uid], filepath.Join(s.folder, file.Name()))
		}
	}
	known = map[types.UID]*entry{}
	for uid, paths := range paths {
		known[uid] = s.load(uid, paths)
	}
	return known, func() { _ = lock.Unlock() }, err // it fails for a bad descriptor only
}

// read reads and parses a file.
func read(path string, uid types.UID, boot string) file {
	f := file{path: path}
	if f.data, f.err = os.ReadFile(path); f.err != nil {
		f.data = nil
		return f
	}
	f.head, f.record, f.err = parse(f.data, uid, boot)
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
		f := read(path, uid, boot)
		if boot != s.boot {
			if f.record != nil && f.record.State == Prepared {
				e.before = f.record
			}
			e.earlier = append(e.earlier, f)
			continue
		}
		e.at = max(e.at, f.head.released)
		// Versions that cannot read each other's files may write one each. The youngest record counts.
		if f.err == nil && (e.file.record == nil || f.record != nil && f.record.Arrived > e.file.record.Arrived) {
			f, e.file = e.file, f
		}
		// A file that is about no GPU guards none.
		if f.err != nil && (f.head.gpus == nil || len(f.head.gpus) > 0) || f.record != nil {
			e.guards = append(e.guards, f)
		}
	}
	e.record = e.file.record.Clone()
	if e.record == nil {
		e.covers = e.file.head.body
	}
	e.lastRelease = s.releases.learn(uid, e.lastRelease)
	e.age()
	return e
}

// keeps reports whether a claim has to have a file: for its record, or for others who must know that it was released.
func (s *Store) keeps(e *entry) bool {
	return e.record != nil || e.at > 0 && !e.isOver && (len(e.guards) > 0 || s.Alone == nil || !s.Alone())
}

// write makes the file say what is known of a claim, and removes those that are over. It needs no space where only the head
// changes, also if another version wrote the body, which may say more.
func (s *Store) write(e *entry) (err error) {
	f := &e.file
	h, body := head{state: gone, released: e.at, body: e.covers}, []byte(nil)
	if e.record != nil {
		if h, body, err = encode(e.record, e.at); err != nil {
			return err
		}
	}
	h.writes = f.head.writes + 1
	switch {
	case !s.keeps(e):
		err = s.files.Remove(f.path)
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
	if e.age(); e.before == nil {
		e.drop = append(e.drop, e.earlier...)
	}
	for i := range e.drop {
		err = errors.Join(err, s.files.Remove(e.drop[i].path))
	}
	return err
}
