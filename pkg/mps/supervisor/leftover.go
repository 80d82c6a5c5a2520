// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/logchange"
)

const (
	// deepest is how many folders in folders are looked into. What is deeper is moved to the top, where a later look finds it.
	deepest   = 16
	nameBatch = 1024
	// ageInLooks is how old what is left over is at least, in intervals between looks.
	ageInLooks = 10
)

// leftover removes from the /dev/shm of a session what no program has, while others go on.
// All containers have the same one, so what is there says neither by its place nor by its
// owner whose it is. A file goes if nobody has it open or mapped, and it has not changed
// for a while; everything else if it has not changed for a while.
type leftover struct {
	root   *os.File
	device uint64
	// before is when what goes was changed last.
	before  time.Time
	removed int
	// err is the first of what could not be removed, which keeps nothing else.
	err error
}

// removeLeftover removes what is left over in a folder, and returns how many files that were.
func removeLeftover(ctx context.Context, path string, before time.Time) (int, error) {
	root, err := openBeneath(unix.AT_FDCWD, path)
	if err != nil {
		return 0, fmt.Errorf("look for what containers left: %w", err)
	}
	defer func() { _ = root.Close() }()
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return 0, fmt.Errorf("look for what containers left in %s: %w", path, err)
	}
	l := &leftover{root: root, device: st.Dev, before: before}
	if err := cmp.Or(l.folder(ctx, root, 0), l.err); err != nil {
		return l.removed, fmt.Errorf("remove what containers left in %s: %w", path, err)
	}
	return l.removed, nil
}

// folder removes what goes from a folder. Names appear and disappear meanwhile.
func (l *leftover) folder(ctx context.Context, at *os.File, depth int) error {
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		names, readErr := at.Readdirnames(nameBatch)
		for _, name := range names {
			if err := l.entry(ctx, at, name, depth); err != nil && l.err == nil {
				l.err = fmt.Errorf("%q: %w", name, err)
			}
		}
		switch {
		case errors.Is(readErr, io.EOF), errors.Is(readErr, fs.ErrNotExist):
			return nil
		case readErr != nil:
			return readErr
		}
	}
}

// entry removes a file or folder if it goes.
func (l *leftover) entry(ctx context.Context, at *os.File, name string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(at.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return ignoreAbsent(err)
	}
	if st.Dev != l.device {
		return nil
	}
	old, flags := time.Unix(st.Ctim.Unix()).Before(l.before), 0
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		if err := l.below(ctx, at, name, depth, old); err != nil {
			return err
		}
		flags = unix.AT_REMOVEDIR
	case unix.S_IFREG:
		if !old {
			return nil
		}
		file, err := openUnused(at, name, &st)
		if file == nil || err != nil {
			return err
		}
		defer func() { _ = file.Close() }() // until then who opens it waits
	}
	if !old {
		return nil
	}
	err := unix.Unlinkat(int(at.Fd()), name, flags)
	switch {
	case err == nil:
		l.removed++
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EBUSY), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTDIR):
		return nil // something is in it, or it is another one by now
	}
	return ignoreAbsent(err)
}

// below looks into a folder, or moves one to the top that is too deep and old.
func (l *leftover) below(ctx context.Context, at *os.File, name string, depth int, old bool) error {
	if depth == deepest {
		if !old {
			return nil
		}
		return ignoreAbsent(unix.Renameat(int(at.Fd()), name, int(l.root.Fd()), "deep-"+rand.Text()))
	}
	folder, err := openBeneath(int(at.Fd()), name)
	if err != nil {
		return nil // it is gone, or another one by now
	}
	defer func() { _ = folder.Close() }()
	return l.folder(ctx, folder, depth+1)
}

// openUnused opens a file that was looked at, and nobody else has open or mapped: the kernel grants a write lease on no other
// one (fcntl(2)), whoever has it, and asks nobody. It returns nil for a file that somebody has, or that is another one by now.
func openUnused(at *os.File, name string, st *unix.Stat_t) (*os.File, error) {
	fd, err := unix.Openat2(int(at.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, nil //nolint:nilnil,nilerr // as said
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
	return nil, errors.Join(fmt.Errorf("find out whether %q is open: %w", name, err), file.Close())
}

// openBeneath opens a folder to look into it. In a folder, it follows no link and enters
// no mount.
func openBeneath(at int, path string) (*os.File, error) {
	how := unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC}
	if at != unix.AT_FDCWD {
		how.Resolve = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV
	}
	fd, err := unix.Openat2(at, path, &how)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// removeLeftovers removes what ended containers left in all sessions, now and then, until ctx ends.
func (s *Supervisor) removeLeftovers(ctx context.Context) {
	ticker := time.NewTicker(s.options.LeftoverInterval)
	defer ticker.Stop()
	var problem logchange.Problem
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := errors.Join(host.RemoveAside(ctx, s.options.Dir), s.removeLeftover(ctx)); ctx.Err() == nil {
			problem.Log(ctx, err, "What ended containers left stays", "")
		}
	}
}

// removeLeftover looks into all sessions once.
func (s *Supervisor) removeLeftover(ctx context.Context) error {
	before := time.Now().Add(-ageInLooks * s.options.LeftoverInterval)
	var errs []error
	for _, id := range s.ids() {
		shm := mount{path: s.folder(id).shm()}
		if mounted, err := shm.mounted(); !mounted || err != nil {
			continue // it is being made, or removed
		}
		removed, err := removeLeftover(ctx, shm.path, before)
		if removed > 0 {
			klog.FromContext(ctx).Info("Removed what ended containers left in /dev/shm", "session", id, "files", removed)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
