// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sysroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
)

// tree writes files below a root. It keeps the first error and does nothing
// after it, and it remembers what it wrote. Paths are relative to the root.
type tree struct {
	root    string
	written map[string]bool
	err     error
}

func newTree(root string) *tree { return &tree{root: root, written: map[string]bool{}} }

// path registers a file and makes its folder.
func (t *tree) path(name string) string {
	t.written[name] = true
	full := filepath.Join(t.root, name)
	if t.err == nil {
		t.err = os.MkdirAll(filepath.Dir(full), 0o755)
	}
	return full
}

func (t *tree) file(name, content string) {
	full := t.path(name)
	if t.err == nil {
		t.err = renameio.WriteFile(full, []byte(content), 0o444, renameio.IgnoreUmask())
	}
}

func (t *tree) link(name, target string) {
	full := t.path(name)
	if t.err == nil {
		t.err = renameio.Symlink(target, full)
	}
}

// copy copies an executable or library from outside the root.
func (t *tree) copy(name, from string) {
	full := t.path(name)
	if t.err != nil {
		return
	}
	data, err := os.ReadFile(from)
	if err == nil {
		err = renameio.WriteFile(full, data, 0o755, renameio.IgnoreUmask())
	}
	t.err = err
}

// hardLink gives a file of the root a second name.
func (t *tree) hardLink(name, existing string) {
	t.replace(name, func(temporary string) error { return os.Link(filepath.Join(t.root, existing), temporary) })
}

// node makes a character node.
func (t *tree) node(name string, mode uint32, major, minor int) {
	t.replace(name, func(temporary string) error {
		device := unix.Mkdev(uint32(major), uint32(minor))
		if err := unix.Mknod(temporary, unix.S_IFCHR|mode, int(device)); err != nil {
			return notPermitted(filepath.Join(t.root, name), err)
		}
		return os.Chmod(temporary, fs.FileMode(mode)) // past the umask
	})
}

// replace makes something under a temporary name and renames it.
func (t *tree) replace(name string, create func(temporary string) error) {
	full := t.path(name)
	if t.err != nil {
		return
	}
	temporary := filepath.Join(filepath.Dir(full), ".new-"+filepath.Base(full))
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.err = err
		return
	}
	if t.err = create(temporary); t.err != nil {
		return
	}
	// Renaming one link of a file over another of the same file does nothing.
	if t.err = os.Rename(temporary, full); t.err == nil {
		if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.err = err
		}
	}
}

// sweep removes what is below the folders and was not written, and folders that
// are empty then.
func (t *tree) sweep(folders ...string) error {
	for _, folder := range folders {
		if _, err := t.sweepOne(folder); err != nil {
			return fmt.Errorf("remove what an earlier machine left: %w", err)
		}
	}
	return nil
}

func (t *tree) sweepOne(folder string) (empty bool, err error) {
	entries, err := os.ReadDir(filepath.Join(t.root, folder))
	if err != nil {
		return false, err
	}
	empty = true
	for _, e := range entries {
		name := filepath.Join(folder, e.Name())
		drop := !t.written[name]
		if e.IsDir() {
			if drop, err = t.sweepOne(name); err != nil {
				return false, err
			}
		}
		if !drop {
			empty = false
		} else if err := os.Remove(filepath.Join(t.root, name)); err != nil {
			return false, err
		}
	}
	return empty, nil
}
