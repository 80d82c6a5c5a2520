// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/host"
)

// Files reads and changes files. Tests strike here. Whoever is killed, all processes see what a
// call has done; the machine need not: no call waits for the disk.
type Files interface {
	Read(path string) ([]byte, error)
	// Replace puts the content in place in one piece.
	Replace(path string, data []byte) error
	// WriteHead writes over the beginning of a file, and takes no space.
	WriteHead(path string, data []byte) error
	Truncate(path string, size int64) error
	// Remove removes what Replace made. An absent file is a success.
	Remove(path string) error
	Move(from, to string) error
}

// OS is the file system of this machine.
type OS struct{}

var _ Files = OS{}

// Read implements Files.
func (OS) Read(path string) ([]byte, error) { return os.ReadFile(path) }

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

// Truncate implements Files.
func (OS) Truncate(path string, size int64) error { return os.Truncate(path, size) }

// Remove implements Files.
func (OS) Remove(path string) error { return host.RemoveUnsynced(path) }

// Move implements Files.
func (OS) Move(from, to string) error { return os.Rename(from, to) }

// NoSpace reports whether a write failed because the disk, or a quota on it, is full.
func NoSpace(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

const (
	lockPoll = time.Millisecond
	// lockLimit is a thousand times as long as anybody keeps the lock who is not stopped.
	lockLimit = 5 * time.Second
)

// lockFolder keeps off other processes: from writing, or with LOCK_EX from reading as well. The
// lock is the folder's own, since a file could be removed, and takes no space.
func lockFolder(folder string, how int) (*os.File, error) {
	for end := time.Now().Add(lockLimit); ; time.Sleep(lockPoll) {
		if how == unix.LOCK_EX {
			if err := os.MkdirAll(folder, 0o750); err != nil {
				return nil, err
			}
		}
		file, err := os.Open(folder)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(file.Fd()), how|unix.LOCK_NB)
		if err == nil && isAt(file, folder) {
			return file, nil
		}
		_ = file.Close() // nothing was written
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, fmt.Errorf("lock %s: %w", folder, err)
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("lock %s: another process has had it for %s", folder, lockLimit)
		}
	}
}

// isAt reports whether the open folder has not been removed or replaced.
func isAt(file *os.File, path string) bool {
	open, openErr := file.Stat()
	there, thereErr := os.Stat(path)
	return openErr == nil && thereErr == nil && os.SameFile(open, there)
}

// absent reports whether an error says that there is no such file.
func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }
