// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"io/fs"
	"os"

	"github.com/partage-dev/partage/pkg/host"
)

// Files changes files. Tests strike here. Whoever is killed, all processes see what a call
// has done; the machine need not: no call waits for the disk.
type Files interface {
	// Replace puts the content in place in one piece.
	Replace(path string, data []byte, mode fs.FileMode) error
	Write(path string, data []byte, mode fs.FileMode) error
	// Remove removes what Replace or Write made. An absent file is a success.
	Remove(path string) error
	Move(from, to string) error
}

// OS is the file system of this machine.
type OS struct{}

var _ Files = OS{}

// Replace implements Files.
func (OS) Replace(path string, data []byte, mode fs.FileMode) error {
	return host.ReplaceUnsynced(path, data, mode)
}

// Write implements Files.
func (OS) Write(path string, data []byte, mode fs.FileMode) error {
	return os.WriteFile(path, data, mode)
}

// Remove implements Files.
func (OS) Remove(path string) error { return host.RemoveUnsynced(path) }

// Move implements Files.
func (OS) Move(from, to string) error { return os.Rename(from, to) }
