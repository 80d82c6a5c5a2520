// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// besideSuffix is of the file that says when a claim was released whose record cannot be read.
	besideSuffix = ".released"
	asideInfix   = ".unreadable-"

	lockPoll = time.Millisecond
	// lockLimit is a thousand times as long as a process has the lock that is not stopped.
	lockLimit = 5 * time.Second
)

// disk is what all processes see.
type disk struct {
	dataDir, boot, folder string
	files                 Files
	// turn is for goroutines what the folder's lock is for processes.
	turn sync.RWMutex
	mu   sync.Mutex
	// parsed are the last contents of files, by path: most do not change between two snapshots.
	parsed map[string]parsed
}

// parsed is the body of a file. Nobody changes it.
type parsed struct {
	body   []byte
	record *Record
}

// lock comes before all that follows here, with LOCK_EX before what writes. It is the folder's own
// lock: it takes no space, and nobody removes it without being noticed.
func (d *disk) lock(how int, uids ...types.UID) (unlock func(), err error) {
	for _, uid := range uids {
		if err := CheckUID(uid); err != nil {
			return nil, err
		}
	}
	take, give := d.turn.RLock, d.turn.RUnlock
	if how == unix.LOCK_EX {
		take, give = d.turn.Lock, d.turn.Unlock
	}
	take()
	for end := time.Now().Add(lockLimit); ; time.Sleep(lockPoll) {
		folder, err := d.tryLock(how)
		switch {
		case err == nil:
			return func() { _ = folder.Close(); give() }, nil // nothing was written
		case absent(err) && how == unix.LOCK_SH:
			return give, nil // there is nothing to read
		case !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end):
			give()
			return nil, fmt.Errorf("lock of the records in %s: %w", d.folder, err)
		}
	}
}

func (d *disk) tryLock(how int) (*os.File, error) {
	if how == unix.LOCK_EX {
		if err := os.MkdirAll(d.folder, 0o750); err != nil {
			return nil, err
		}
	}
	folder, err := os.Open(d.folder)
	if err != nil {
		return nil, err
	}
	open, openErr := folder.Stat()
	err = errors.Join(openErr, unix.Flock(int(folder.Fd()), how|unix.LOCK_NB))
	if there, thereErr := os.Stat(d.folder); err == nil && (thereErr != nil || !os.SameFile(open, there)) {
		err = unix.EWOULDBLOCK // it was removed meanwhile
	}
	if err != nil {
		_ = folder.Close() // nothing was written
		return nil, err
	}
	return folder, nil
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
	// beside means that a file says so, pending that not all is written.
	beside, pending bool
}

// age says of a record that is older than the release that it is being released.
func (e *entry) age() {
	if e.record != nil && e.record.Arrived < e.released {
		e.record.State = Releasing
	}
}

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

// load reads the files of a claim in this boot.
func (d *disk) load(uid types.UID) *entry {
	e := d.read(filepath.Join(d.folder, string(uid)), uid)
	beside := d.read(e.path+besideSuffix, uid)
	e.beside = beside.data != nil || beside.err != nil
	e.released = max(e.released, beside.released)
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
	d.mu.Lock()
	known := d.parsed[path]
	d.mu.Unlock()
	if known.record == nil || !bytes.Equal(known.body, body) {
		known.body = body
		if known.record, e.err = parseBody(body, uid, e.head.body); e.err != nil {
			return e
		}
		d.mu.Lock()
		d.parsed[path] = known
		d.mu.Unlock()
	}
	record := known.record.Clone()
	record.BootID = filepath.Base(filepath.Dir(path))
	if e.err = e.head.apply(record); e.err == nil {
		e.body, e.record = known.record, record
	}
	return e
}

// write makes the files say what the entry says.
func (d *disk) write(e *entry) error {
	var err error
	stone := head{state: gone, released: e.released, marks: e.head.marks, gpus: e.head.gpus}
	switch line := stone.line(); {
	case e.err != nil:
		err = d.files.Replace(e.path+besideSuffix, line)
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
	if err == nil && e.err == nil && e.beside {
		_ = d.files.Remove(e.path + besideSuffix) // Sweep tries again
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
	if e.body != nil {
		if was, err := encodeBody(e.body); err == nil && bytes.Equal(was, body) {
			h.gpus, h.body = e.head.gpus, e.head.body // what another version wrote stays
			return d.files.WriteHead(e.path, h.line())
		}
	}
	return d.files.Replace(e.path, append(h.line(), body...))
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
	to := e.path
	for n, err := 1, error(nil); err == nil; n++ {
		to = fmt.Sprintf("%s%s%d-%d", e.path, asideInfix, since, n)
		if _, err = os.Lstat(to); err != nil && !absent(err) {
			return fmt.Errorf("%w, and not be moved aside: %w", e.unreadable(), err)
		}
	}
	if err := d.files.Move(e.path, to); err != nil {
		return fmt.Errorf("%w, and not be moved aside: %w", e.unreadable(), err)
	}
	e.data, e.body, e.err, e.head = nil, nil, nil, head{}
	return nil
}

// list returns the claims that have a file of this boot, with the files that were moved aside.
func (d *disk) list() (map[types.UID][]string, error) {
	files, err := os.ReadDir(d.folder)
	if err != nil && !absent(err) {
		return nil, fmt.Errorf("records: %w", err)
	}
	listed := map[types.UID][]string{}
	for _, file := range files {
		name, _, isAside := strings.Cut(strings.TrimSuffix(file.Name(), besideSuffix), asideInfix)
		uid := types.UID(name)
		if CheckUID(uid) != nil {
			continue
		}
		aside := listed[uid]
		if isAside {
			aside = append(aside, filepath.Join(d.folder, file.Name()))
		}
		listed[uid] = aside
	}
	return listed, nil
}

// earlier returns the folders of earlier boots. What cannot be listed of them blocks nothing.
func (d *disk) earlier() []string {
	root := filepath.Dir(d.folder)
	entries, _ := os.ReadDir(root)
	var folders []string
	for _, entry := range entries {
		if name := entry.Name(); name != d.boot && entry.IsDir() {
			folders = append(folders, filepath.Join(root, name))
		}
	}
	return folders
}

// dropEarlier removes the records of a claim of earlier boots.
func (d *disk) dropEarlier(uid types.UID) error {
	var errs []error
	for _, folder := range d.earlier() {
		errs = append(errs, d.files.Remove(filepath.Join(folder, string(uid))))
	}
	return errors.Join(errs...)
}

// sweepEarlier removes what is no record of an earlier boot: nothing that it was about is left.
func (d *disk) sweepEarlier() error {
	var errs []error
	for _, folder := range d.earlier() {
		files, err := os.ReadDir(folder)
		errs = append(errs, err)
		for _, file := range files {
			path := filepath.Join(folder, file.Name())
			if !file.IsDir() && d.read(path, types.UID(file.Name())).record == nil {
				errs = append(errs, d.files.Remove(path))
			}
		}
		if len(files) == 0 && err == nil {
			errs = append(errs, os.Remove(folder))
		}
	}
	return errors.Join(errs...)
}
