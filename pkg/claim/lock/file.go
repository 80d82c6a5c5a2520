// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// fileName is the file of which each lock is one byte, by a hash of its name. The file stays empty:
// the kernel locks bytes that are not there, and a claim's lock needs no file of its own.
const fileName = "all.lock"

// offset is the byte of a lock. That two names have the same is as likely as that two UIDs are
// the same.
func (n name) offset() int64 {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(n)) // it does not fail
	return int64(hash.Sum64() & math.MaxInt64)
}

// open opens the file, unless it is open already. busy means that another process has one that
// was removed: a new file would keep off nobody, so that it has to end first. Therefore all that
// have the file open share a lock of the data folder. It is of another kind than flock's, which
// others use there. The caller holds mu.
func (l *Locks) open() (busy bool, err error) {
	if l.file != nil {
		return false, nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("locks: %w", err)
		}
		if l.file == nil {
			_ = l.folder.Close() // nothing was written
		}
	}()
	if err = os.MkdirAll(l.dir, 0o750); err != nil {
		return false, err
	}
	if l.folder, err = os.Open(filepath.Dir(l.dir)); err != nil {
		return false, err
	}
	if err = setLock(l.folder, 0, unix.F_RDLCK); err != nil {
		return false, err
	}
	path := filepath.Join(l.dir, fileName)
	l.file, err = os.OpenFile(path, os.O_RDWR, 0)
	if !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	others := unix.Flock_t{Type: unix.F_WRLCK, Len: 1}
	if err = unix.FcntlFlock(l.folder.Fd(), unix.F_OFD_GETLK, &others); err != nil || others.Type != unix.F_UNLCK {
		return err == nil, err
	}
	l.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	return false, err
}

// lockFile locks names against other processes, all or none. held is one that another process has.
func (l *Locks) lockFile(names []name) (held name, err error) {
	l.mu.Lock()
	busy, err := l.open()
	l.mu.Unlock()
	if busy || err != nil {
		return names[0], err
	}
	for i, n := range names {
		err := setLock(l.file, n.offset(), unix.F_WRLCK)
		if err == nil {
			continue
		}
		for _, locked := range names[:i] {
			l.unlockFile(locked)
		}
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			return n, nil
		}
		return "", fmt.Errorf("lock of %s: %w", n, err)
	}
	return "", nil
}

func (l *Locks) unlockFile(n name) {
	// It fails for a bad descriptor only, which holds no lock either.
	_ = setLock(l.file, n.offset(), unix.F_UNLCK)
}

// setLock sets a lock that belongs to the open file: as with flock, the kernel lets go of it when
// the process ends, and another open file in the same process is another owner.
func setLock(file *os.File, offset int64, kind int16) error {
	lock := unix.Flock_t{Type: kind, Start: offset, Len: 1}
	for {
		err := unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &lock)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
