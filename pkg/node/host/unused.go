// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// deepest is how many folders in folders are opened, a descriptor for each. What is deeper, which no program needs, is moved to
// the top, where the next call finds it.
const deepest = 128

// unused removes what no program has from a folder that many write to, while they go on.
type unused struct {
	top     *os.File
	before  time.Time
	removed int
	// err is the first of what could not be removed, which keeps nothing else.
	err error
}

// RemoveUnused removes what has not changed since a time from a folder that many write to, while they go on: a file only if
// nobody has it open or mapped. It returns how many files and folders that were. As RemoveTree it follows no symbolic link and
// enters no mount.
func RemoveUnused(ctx context.Context, path string, before time.Time) (removed int, err error) {
	top, err := openFolder(unix.AT_FDCWD, path)
	if err != nil {
		return 0, fmt.Errorf("remove what nobody uses: %w", err)
	}
	defer func() { _ = top.Close() }()
	u := &unused{top: top, before: before}
	if err := cmp.Or(u.folder(ctx, top, 0), u.err); err != nil {
		return u.removed, fmt.Errorf("remove what nobody uses in %s: %w", path, err)
	}
	return u.removed, nil
}

func (u *unused) folder(ctx context.Context, folder *os.File, depth int) error {
	_, err := eachName(ctx, folder, func(name string) error {
		if err := u.entry(ctx, folder, name, depth); err != nil && u.err == nil {
			u.err = fmt.Errorf("%q: %w", name, err)
		}
		return nil
	})
	return err
}

// entry removes a file or folder if it goes. Names appear and disappear meanwhile.
func (u *unused) entry(ctx context.Context, at *os.File, name string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(at.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return ignoreAbsent(err)
	}
	old := time.Unix(st.Ctim.Unix()).Before(u.before)
	isFolder := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if isFolder && depth < deepest {
		folder, err := openFolder(int(at.Fd()), name)
		if err != nil {
			return nil // it is gone, or another one by now
		}
		defer func() { _ = folder.Close() }()
		if err := u.folder(ctx, folder, depth+1); err != nil {
			return err
		}
	}
	switch {
	case !old:
		return nil
	case isFolder && depth == deepest:
		return ignoreAbsent(unix.Renameat(int(at.Fd()), name, int(u.top.Fd()), asidePrefix+rand.Text()))
	case st.Mode&unix.S_IFMT == unix.S_IFREG:
		file, err := openUnused(at, name, &st)
		if file == nil || err != nil {
			return err
		}
		defer func() { _ = file.Close() }() // until then who opens it waits
	}
	done, err := unlink(at, name)
	if done {
		u.removed++
	}
	return err
}

// openUnused opens a file that nobody else has open or mapped: on any other one the kernel refuses a write lease (fcntl(2)). It
// returns nil if somebody has the file, or if the name is that of another file by now.
func openUnused(at *os.File, name string, st *unix.Stat_t) (*os.File, error) {
	fd, err := unix.Openat2(int(at.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, nil //nolint:nilnil,nilerr // see the comment of openUnused
	}
	file := os.NewFile(uintptr(fd), name)
	var now unix.Stat_t
	if err := unix.Fstat(fd, &now); err != nil || now.Ino != st.Ino || now.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, errors.Join(err, file.Close())
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_WRLCK)
	switch {
	case err == nil:
		return file, nil
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EBUSY):
		return nil, file.Close()
	}
	return nil, errors.Join(fmt.Errorf("find out whether it is open: %w", err), file.Close())
}
