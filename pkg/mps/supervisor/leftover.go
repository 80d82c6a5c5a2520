// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/logchange"
)

const (
	// deepest is how many folders in folders are looked into. Nobody needs more in a
	// /dev/shm.
	deepest = 16
	// mostOwners is how many files are looked up in one round, some 10 µs each.
	mostOwners = 1 << 14
	nameBatch  = 1024
	// scarce is the part of the room that is left when it is scarce.
	scarce = 8
)

// leftover removes from the /dev/shm of a session what containers left that have ended,
// while others go on. All of them have the same one, so what is there says neither by its
// place nor by its owner whose it is. Something goes if
//
//   - nobody has it open or mapped, or works in it,
//   - it has not changed for a while, and
//   - the memory cgroup that its content is charged to is that of no pod and of no process
//     any more: the kernel charges a page to who touches it first, and passes it on to the
//     nearest cgroup that is left.
//
// What has no content is charged to nobody: empty files, folders, room that was set aside.
// It goes only when so little of the session's room is left that soon nobody could go on,
// and nobody has it open.
type leftover struct {
	// proc is the host's procfs.
	proc  string
	grace time.Duration
	now   func() time.Time
	// most is how many files are looked up in one round, mostOwners if it is 0. skip is how
	// many each folder's next round leaves out, which earlier ones have looked up.
	most int
	skip map[string]int
}

// round is one look at one folder.
type round struct {
	*leftover
	owners *owners
	device uint64
	// fewFiles and fewBytes: hardly any more fit.
	fewFiles, fewBytes bool
	// used are the files that processes have. Without it, nothing is removed.
	used *used
	// looked are the files whose owner is asked for, removed is what went or would.
	looked, removed int
	// skip and end are the first of these that is looked up, and the first after the last.
	skip, end int
}

// remove removes what is left over in a folder, and returns how many files that were.
// What appeared after the look at the owners stays.
func (l *leftover) remove(ctx context.Context, owners *owners, path string) (int, error) {
	root, err := openBeneath(unix.AT_FDCWD, path)
	if err != nil {
		return 0, fmt.Errorf("look for what containers left: %w", err)
	}
	defer func() { _ = root.Close() }()
	var st unix.Stat_t
	var room unix.Statfs_t
	if err := errors.Join(unix.Fstat(int(root.Fd()), &st), unix.Fstatfs(int(root.Fd()), &room)); err != nil {
		return 0, fmt.Errorf("look for what containers left in %s: %w", path, err)
	}
	skip := l.skip[path]
	r := &round{
		leftover: l, owners: owners, device: st.Dev, skip: skip, end: skip + cmp.Or(l.most, mostOwners),
		fewFiles: room.Ffree < room.Files/scarce, fewBytes: room.Bfree < room.Blocks/scarce,
	}
	// Who has which file open costs most, and is asked for only if something may go.
	_, err = r.folder(ctx, root, 0)
	if err == nil && r.removed > 0 {
		if r.used, err = l.used(ctx, st.Dev); err == nil {
			r.looked, r.removed = 0, 0
			_, err = r.folder(ctx, root, 0)
		}
	}
	if err != nil {
		return 0, fmt.Errorf("remove what containers left in %s: %w", path, err)
	}
	l.goOn(path, r)
	if r.used == nil {
		return 0, nil
	}
	return r.removed, nil
}

// goOn makes the next round go on where this one stopped, or start over. Otherwise many files
// of somebody who lives would hide all others.
func (l *leftover) goOn(path string, r *round) {
	delete(l.skip, path)
	if r.looked <= r.end {
		return
	}
	if l.skip == nil {
		l.skip = map[string]int{}
	}
	l.skip[path] = r.end
	if r.used != nil {
		l.skip[path] = max(0, r.end-r.removed)
	}
}

// folder removes what goes from a folder, and reports whether all did. Names appear and
// disappear meanwhile.
func (r *round) folder(ctx context.Context, at *os.File, depth int) (empty bool, err error) {
	empty = true
	for {
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		names, readErr := at.Readdirnames(nameBatch)
		for _, name := range names {
			gone, err := r.entry(ctx, at, name, depth)
			if err != nil {
				return false, err
			}
			empty = empty && gone
		}
		if errors.Is(readErr, io.EOF) || errors.Is(readErr, fs.ErrNotExist) {
			_, err := at.Seek(0, io.SeekStart) // for the second look
			return empty, err
		}
		if readErr != nil {
			return false, readErr
		}
	}
}

// entry removes a file or folder if it goes.
func (r *round) entry(ctx context.Context, at *os.File, name string, depth int) (gone bool, err error) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(at.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return true, ignoreAbsent(err)
	}
	if st.Dev != r.device {
		return false, nil
	}
	idle := !r.used.hasFile(st.Ino) && r.owners.at.Sub(time.Unix(st.Ctim.Unix())) >= r.grace
	var flags int
	var live bool
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		flags = unix.AT_REMOVEDIR
		gone, err = r.below(ctx, at, name, depth, idle && !r.used.hasFolder(name))
		live = !gone
	case unix.S_IFREG:
		live = !idle
		if idle {
			live, err = r.isLive(at, name, &st)
		}
	default:
		live = !idle || !r.fewFiles
	}
	if live || err != nil {
		return false, err
	}
	r.removed++
	if r.used == nil {
		return true, nil
	}
	return unlink(at, name, flags)
}

// unlink removes a file or an empty folder, and reports false if it is another one by now.
func unlink(at *os.File, name string, flags int) (bool, error) {
	err := unix.Unlinkat(int(at.Fd()), name, flags)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	}
	return true, ignoreAbsent(err)
}

// below looks into a folder. It reports whether the folder itself goes, which somebody who
// lives may have made: if it is idle, nothing stays in it, and there is no room for such.
func (r *round) below(ctx context.Context, at *os.File, name string, depth int, idle bool) (gone bool, err error) {
	folder, err := openBeneath(int(at.Fd()), name)
	if err != nil {
		return false, nil // it is gone, or another one by now
	}
	defer func() { _ = folder.Close() }()
	if depth == deepest {
		if idle && r.fewFiles && r.used != nil {
			return true, host.ClearFolder(ctx, filepath.Join("/proc/self/fd", strconv.Itoa(int(folder.Fd()))))
		}
		return idle && r.fewFiles, nil
	}
	empty, err := r.folder(ctx, folder, depth+1)
	return idle && empty && r.fewFiles, err
}

// isLive reports whether a file is that of somebody who lives, as far as is known.
func (r *round) isLive(at *os.File, name string, st *unix.Stat_t) (bool, error) {
	if st.Blocks == 0 {
		return !r.fewFiles, nil
	}
	if r.looked++; r.looked <= r.skip || r.looked > r.end {
		return true, nil // for another round
	}
	file, err := openFile(at, name, st)
	if file == nil || err != nil {
		return true, err
	}
	defer func() { _ = file.Close() }()
	owner, err := r.owners.of(file)
	switch {
	case errors.Is(err, errNoContent):
		return !r.fewBytes, nil
	case err != nil:
		return true, err
	}
	return !r.owners.hasEnded(owner), nil
}

// openFile opens a file that was looked at, unless it is another one by now.
func openFile(at *os.File, name string, st *unix.Stat_t) (*os.File, error) {
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
	return file, nil
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

// removeLeftovers removes what ended containers left in all sessions, now and then, until
// the supervisor closes.
func (s *Supervisor) removeLeftovers(ctx context.Context) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	go func() {
		select {
		case <-s.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	ticker := time.NewTicker(s.options.LeftoverInterval)
	defer ticker.Stop()
	l := &leftover{proc: s.options.Roots.Complete().Proc, grace: s.options.LeftoverInterval, now: time.Now}
	var problem logchange.Problem
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := errors.Join(host.RemoveAside(ctx, s.options.Dir), s.removeLeftover(ctx, l)); ctx.Err() == nil {
			problem.Log(ctx, err, "What ended containers left stays", "")
		}
	}
}

// removeLeftover looks into all sessions once.
func (s *Supervisor) removeLeftover(ctx context.Context, l *leftover) error {
	ids := s.ids()
	if len(ids) == 0 {
		return nil
	}
	owners, err := l.owners()
	if err != nil {
		return fmt.Errorf("find out whose files in /dev/shm are: %w", err)
	}
	defer owners.close()
	var errs []error
	for _, id := range ids {
		shm := mount{path: s.folder(id).shm()}
		if mounted, err := shm.mounted(); !mounted || err != nil {
			continue // it is being made, or removed
		}
		removed, err := l.remove(ctx, owners, shm.path)
		if removed > 0 {
			klog.FromContext(ctx).Info("Removed what ended containers left in /dev/shm", "session", id, "files", removed)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
