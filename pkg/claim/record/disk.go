// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"
	"golang.org/x/sync/semaphore"
	"k8s.io/apimachinery/pkg/types"
)

const (
	lockPoll = time.Millisecond
	// allShares are more than the goroutines that read at the same time.
	allShares = 1 << 30
	// lockLimit is a thousand times as long as a process has the lock that is not stopped.
	lockLimit = 5 * time.Second

	// besideSuffix is of the file that says when a claim was released whose record cannot be read.
	besideSuffix = ".released"
	asideSuffix  = ".unreadable-"
)

// disk is what all processes see.
type disk struct {
	folder, boot string
	files        Files
	// turn is for goroutines what the folder's lock is for processes.
	turn *semaphore.Weighted
	// parsed are the last bodies of files, by path: most do not change between two snapshots.
	parsed sync.Map
}

// parsed is the body of a file. Nobody changes it.
type parsed struct {
	body   string
	record *Record
}

// lock comes before all that follows here, and is exclusive before what writes. It is the folder's
// own lock, which takes no space. A folder that is not there needs none to be read.
func (d *disk) lock(exclusive bool, uids ...types.UID) (unlock func(), err error) {
	for _, uid := range uids {
		if err := CheckUID(uid); err != nil {
			return nil, err
		}
	}
	lock := flock.New(d.folder, flock.SetFlag(os.O_RDONLY))
	share, try := int64(1), lock.TryRLockContext
	if exclusive {
		share, try = allShares, lock.TryLockContext
		err = os.MkdirAll(d.folder, 0o750)
	}
	_ = d.turn.Acquire(context.Background(), share) // it does not end
	give := func() { d.turn.Release(share) }
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), lockLimit)
		defer cancel()
		_, err = try(ctx, lockPoll)
	}
	if err != nil && (exclusive || !absent(err)) {
		give()
		return nil, fmt.Errorf("lock of the records in %s: %w", d.folder, err)
	}
	return func() { _ = lock.Unlock(); give() }, nil // it fails for a bad descriptor only
}

// entry is what is known of a claim, or what one file says.
type entry struct {
	uid  types.UID
	path string
	// data is nil if there is no file that can be read, and err is not if there is one that cannot.
	data []byte
	// head has no GPUs where not even that can be read.
	head head
	err  error
	// body is what was parsed, and record what that and the head say.
	body, record *Record
	// released is when the claim was last released, or zero.
	released time.Duration
	// pending means that not all is written.
	pending bool
	// beside, aside and earlier are other files of the claim.
	beside, aside, earlier []string
}

// age says of a record that is older than the release that it is being released.
func (e *entry) age() {
	if e.record != nil && e.record.Arrived < e.released {
		e.record.State = Releasing
	}
}

// guardReleased reports whether a release is about the file that cannot be read.
func (e *entry) guardReleased() bool { return e.released > e.head.arrived }

// line returns the head as it is in the file.
func (e *entry) line() string {
	line, _, _ := bytes.Cut(e.data, []byte("\n"))
	return string(line)
}

func (e *entry) unreadable() error {
	if e.err == nil {
		return nil
	}
	return fmt.Errorf("%s cannot be read: %w", e.path, e.err)
}

func (d *disk) path(uid types.UID) string { return filepath.Join(d.folder, string(uid)+"."+d.boot) }

// list finds the files of all claims.
func (d *disk) list() (map[types.UID]*entry, error) {
	files, err := os.ReadDir(d.folder)
	if err != nil && !absent(err) {
		return nil, fmt.Errorf("records: %w", err)
	}
	all := map[types.UID]*entry{}
	for _, file := range files {
		parts := strings.SplitN(file.Name(), ".", 3)
		uid := types.UID(parts[0])
		if CheckUID(uid) != nil || len(parts) == 1 {
			continue
		}
		if all[uid] == nil {
			all[uid] = &entry{uid: uid}
		}
		e, path := all[uid], filepath.Join(d.folder, file.Name())
		switch {
		case parts[1] != d.boot:
			e.earlier = append(e.earlier, path)
		case strings.HasSuffix(path, besideSuffix):
			e.beside = append(e.beside, path)
		case strings.Contains(path, asideSuffix):
			e.aside = append(e.aside, path)
		}
	}
	return all, nil
}

// sweepUnfinished removes what killed processes were about to put in place. The caller has the lock, so that nobody is writing.
func (d *disk) sweepUnfinished() error {
	files, err := filepath.Glob(filepath.Join(d.folder, ".*.tmp"))
	for _, path := range files {
		err = errors.Join(err, d.files.Remove(path))
	}
	return err
}

// load reads what an entry says, with the files that were found.
func (d *disk) load(found *entry) *entry {
	e := d.read(d.path(found.uid), found.uid)
	e.beside, e.aside, e.earlier = found.beside, found.aside, found.earlier
	for _, path := range e.beside {
		e.released = max(e.released, d.read(path, e.uid).released)
	}
	return e
}

func (d *disk) read(path string, uid types.UID) *entry {
	data, err := d.files.Read(path)
	if absent(err) {
		err = nil
	}
	e := &entry{uid: uid, path: path, data: data, err: err}
	if data == nil || err != nil {
		return e
	}
	var body []byte
	e.head, body, e.err = parseHead(data)
	e.released = e.head.released
	if e.err != nil || e.head.state == gone {
		return e
	}
	last, _ := d.parsed.Load(path)
	known, _ := last.(parsed)
	if known.body != string(body) {
		known.body = string(body)
		if known.record, e.err = parseBody(body, uid); e.err != nil {
			return e
		}
		d.parsed.Store(path, known)
	}
	record := known.record.Clone()
	_, record.BootID, _ = strings.Cut(filepath.Base(path), ".")
	if e.err = e.head.apply(record); e.err == nil {
		e.body, e.record = known.record, record
	}
	return e
}

// write makes the files say what the entry says.
func (d *disk) write(e *entry) error {
	var err error
	stone := head{state: gone, released: e.released, marks: e.head.marks, gpus: e.head.gpus, writes: e.head.writes + 1}
	switch line := stone.line(); {
	case e.err != nil:
		return d.files.Replace(e.path+besideSuffix, line)
	case e.record != nil:
		err = d.writeRecord(e)
	case e.released == 0:
		err = d.files.Remove(e.path)
	case e.data == nil:
		err = d.files.Replace(e.path, line)
	default:
		if err = d.files.WriteHead(e.path, line); err == nil {
			_ = d.files.Truncate(e.path, int64(len(line))) // it means nothing now: this may fail
		}
	}
	if err == nil {
		_ = d.remove(e.beside) // Sweep tries again
	}
	if e.record == nil {
		d.parsed.Delete(e.path)
	}
	return err
}

func (d *disk) writeRecord(e *entry) error {
	if e.record.BootID != d.boot {
		return fmt.Errorf("it is of boot %q, want %q", e.record.BootID, d.boot)
	}
	h, body, err := encode(e.record, e.released)
	if err != nil {
		return err
	}
	h.writes = e.head.writes + 1
	if e.body != nil {
		if was, err := encodeBody(e.body); err == nil && bytes.Equal(was, body) {
			h.gpus, h.body = e.head.gpus, e.head.body // what another version wrote stays
			return d.files.WriteHead(e.path, h.line())
		}
	}
	return d.files.Replace(e.path, append(h.line(), body...))
}

func (d *disk) remove(paths []string) error {
	var errs []error
	for _, path := range paths {
		errs = append(errs, d.files.Remove(path))
	}
	return errors.Join(errs...)
}

// setAside moves a record that cannot be read away, and does nothing to others. The new name says
// which releases are about it: those that arrived after it was written, as far as is known.
func (d *disk) setAside(e *entry, arrived time.Duration) error {
	if e.err == nil {
		return nil
	}
	since := e.head.arrived
	if since == 0 && e.released == 0 {
		since = arrived
	}
	to := fmt.Sprintf("%s%s%d-%d", e.path, asideSuffix, since, time.Now().UnixNano())
	if err := d.files.Move(e.path, to); err != nil {
		return fmt.Errorf("%w, and not be moved aside: %w", e.unreadable(), err)
	}
	e.data, e.body, e.err, e.head = nil, nil, nil, head{}
	return nil
}
