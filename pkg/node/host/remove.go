// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// asidePrefix begins the names of folders that were moved up to be removed.
const asidePrefix = ".removed-"

// removeBatch is how many names are held at one time.
const removeBatch = 1024

// RemoveTree removes a file, or a folder with all that is in it, as os.RemoveAll does. What a tenant made of a folder cannot stop
// it: it holds no more than four descriptors, and its memory does not grow with the depth or the number of files; it follows no
// symbolic link and enters no mount. After an error, or when ctx ends, the next call goes on.
func RemoveTree(ctx context.Context, path string) error {
	if err := removeTree(ctx, filepath.Dir(path), filepath.Base(path)); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// IsAside reports whether a name in a folder is that of something from deeper in it, which is being removed.
func IsAside(name string) bool { return strings.HasPrefix(name, asidePrefix) }

// ClearFolder removes all that is in a folder, as RemoveTree does, and keeps the folder.
func ClearFolder(ctx context.Context, path string) error {
	folder, err := openFolder(unix.AT_FDCWD, path)
	if err == nil {
		err = flatten(ctx, folder, unlink)
	}
	if err != nil {
		return fmt.Errorf("clear %s: %w", path, err)
	}
	return nil
}

// removeTree removes a file or folder by its name in a folder.
func removeTree(ctx context.Context, folder, name string) error {
	at, err := openFolder(unix.AT_FDCWD, folder)
	if err != nil {
		return ignoreAbsent(err)
	}
	defer func() { _ = at.Close() }()
	done, err := unlink(at, name)
	if done || err != nil {
		return err
	}
	top, err := openFolder(int(at.Fd()), name)
	if err != nil {
		return ignoreAbsent(err) // another process is at it, too
	}
	if err := flatten(ctx, top, unlink); err != nil {
		return err
	}
	return ignoreAbsent(unix.Unlinkat(int(at.Fd()), name, unix.AT_REMOVEDIR))
}

// remove removes a file or an empty folder. It reports false for one that is not empty.
type remove func(folder *os.File, name string) (bool, error)

// flatten removes all that is in a folder, and closes it. Folders in folders are moved up
// to it, so that no path grows and nothing needs to be remembered.
func flatten(ctx context.Context, top *os.File, remove remove) error {
	defer func() { _ = top.Close() }()
	for {
		empty, err := eachName(ctx, top, func(name string) error {
			done, err := remove(top, name)
			if done || err != nil {
				return err
			}
			return lift(ctx, top, name, remove)
		})
		if empty || err != nil {
			return err
		}
	}
}

// lift removes a folder after it moved the folders in it up to its own folder.
func lift(ctx context.Context, top *os.File, name string, remove remove) error {
	folder, err := openFolder(int(top.Fd()), name)
	if err != nil {
		return ignoreAbsent(err)
	}
	defer func() { _ = folder.Close() }()
	_, err = eachName(ctx, folder, func(child string) error {
		done, err := remove(folder, child)
		if done || err != nil {
			return err
		}
		up := asidePrefix + rand.Text()
		return ignoreAbsent(unix.Renameat(int(folder.Fd()), child, int(top.Fd()), up))
	})
	if err != nil {
		return err
	}
	// What was not seen because names moved meanwhile is for the next round.
	err = unix.Unlinkat(int(top.Fd()), name, unix.AT_REMOVEDIR)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		return nil
	}
	return ignoreAbsent(err)
}

// unlink is a remove.
func unlink(folder *os.File, name string) (bool, error) {
	err := unix.Unlinkat(int(folder.Fd()), name, 0)
	if errors.Is(err, unix.EISDIR) {
		err = unix.Unlinkat(int(folder.Fd()), name, unix.AT_REMOVEDIR)
		if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
			return false, nil
		}
	}
	if err = ignoreAbsent(err); err != nil {
		return false, fmt.Errorf("%q: %w", name, err)
	}
	return true, nil
}

// eachName calls a function for the names in a folder, and reports whether there are
// none. The function may remove what it is called for.
func eachName(ctx context.Context, folder *os.File, do func(string) error) (empty bool, err error) {
	if _, err := folder.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	empty = true
	for {
		if err := ctx.Err(); err != nil {
			return false, context.Cause(ctx)
		}
		names, err := folder.Readdirnames(removeBatch)
		for _, name := range names {
			empty = false
			if err := do(name); err != nil {
				return false, err
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, fs.ErrNotExist) {
			return empty, nil
		}
		if err != nil {
			return false, err
		}
	}
}

// openFolder opens a folder to look into it. If it is in an open folder, it must be there
// itself, not a link to another or a mount.
func openFolder(at int, path string) (*os.File, error) {
	how := unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC}
	if at != unix.AT_FDCWD {
		how.Flags |= unix.O_NOFOLLOW
		how.Resolve = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV
	}
	fd, err := unix.Openat2(at, path, &how)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}
