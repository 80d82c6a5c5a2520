// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"io/fs"
	"os"

	"github.com/partage-dev/partage/pkg/host"
)

// Files changes files. Tests strike here.
type Files interface {
	// Replace puts the content in place in one piece, and for good.
	Replace(path string, data []byte, mode fs.FileMode) error
	// Write need not outlive the machine.
	Write(path string, data []byte, mode fs.FileMode) error
	// Remove removes for good what Replace or Write made. An absent file is a success.
	Remove(path string) error
	Move(from, to string) error
}

// OS is the file system of this machine.
type OS struct{}

var _ Files = OS{}

// Replace implements Files.
func (OS) Replace(path string, data []byte, mode fs.FileMode) error {
	return host.ReplaceFile(path, data, mode)
}

// Write implements Files.
func (OS) Write(path string, data []byte, mode fs.FileMode) error {
	return os.WriteFile(path, data, mode)
}

// Remove implements Files.
func (OS) Remove(path string) error { return host.RemoveFile(path) }

// Move implements Files.
func (OS) Move(from, to string) error { return os.Rename(from, to) }
