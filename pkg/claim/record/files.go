// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

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

// NoSpace reports whether a write failed because the disk, or a quota on it, is full.
func NoSpace(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }
