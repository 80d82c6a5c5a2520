// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math"

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

// lockFile locks names against other processes, all or none. held is one that another process has.
func (l *Locks) lockFile(names []name) (held *name, err error) {
	for i, n := range names {
		err := l.setLock(n, unix.F_WRLCK)
		if err == nil {
			continue
		}
		for _, locked := range names[:i] {
			l.unlockFile(locked)
		}
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			return &names[i], nil
		}
		return nil, fmt.Errorf("lock of %s: %w", n, err)
	}
	return nil, nil
}

func (l *Locks) unlockFile(n name) {
	// It fails for a bad descriptor only, which holds no lock either.
	_ = l.setLock(n, unix.F_UNLCK)
}

// setLock sets a lock that belongs to the open file: as with flock, the kernel lets go of it when
// the process ends, and another open file in the same process is another owner.
func (l *Locks) setLock(n name, kind int16) error {
	lock := unix.Flock_t{Type: kind, Start: n.offset(), Len: 1}
	for {
		err := unix.FcntlFlock(l.file.Fd(), unix.F_OFD_SETLK, &lock)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
