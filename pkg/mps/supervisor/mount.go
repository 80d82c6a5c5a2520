// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/wait"
)

// mount is a tmpfs of a session. Its clients can write to it, or make the daemon do so,
// and must not be able to fill a file system of the host.
type mount struct {
	path, mode string
	// bytes is 0 for the one that has the rest of the session's memory.
	bytes int64
	// shared: running containers have it.
	shared bool
}

// mounts are those of a session.
type mounts []mount

func (f folder) mounts() mounts {
	return mounts{
		{path: f.pipe(), mode: "755", bytes: pipeSize, shared: true},
		{path: string(f.logs()), mode: "755", bytes: logSize},
		{path: f.shm(), mode: "1777", shared: true},
	}
}

// mount mounts what is not mounted: running containers may have the rest. label is
// the SELinux context of that, empty for none.
func (all mounts) mount(session string, shmSize int64, label string) error {
	for _, m := range all {
		mounted, err := m.mounted()
		if err == nil && !mounted {
			size := cmp.Or(m.bytes, shmSize)
			options := fmt.Sprintf("mode=%s,size=%d,nr_inodes=%d", m.mode, size, maxFiles(size))
			err = host.Tmpfs("partage-mps-"+session, m.path, options, label)
		}
		if err != nil {
			return fmt.Errorf("mount a tmpfs of session %s at %s: %w", session, m.path, err)
		}
	}
	return nil
}

// lost returns the paths at which containers have what is not mounted here any more.
func (all mounts) lost() ([]string, error) {
	return slices.DeleteFunc(slices.Clone(all), func(m mount) bool { return !m.shared }).unmounted()
}

// unmounted returns the paths at which nothing is mounted.
func (all mounts) unmounted() (paths []string, err error) {
	for _, m := range all {
		mounted, err := m.mounted()
		if err != nil {
			return nil, err
		}
		if !mounted {
			paths = append(paths, m.path)
		}
	}
	return paths, nil
}

// shrink leaves nothing of the session's /dev/shm to those who have kept it. What they have unlinked and still open keeps no
// session from ending: it is no more than the session could have.
func (all mounts) shrink(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, m := range all {
		if mounted, err := m.mounted(); !mounted || err != nil || m.bytes > 0 {
			continue // unmount says what is wrong
		}
		if err := host.ShrinkTmpfs(ctx, m.path); err != nil {
			klog.FromContext(ctx).Error(err, "Somebody keeps memory of an MPS session that has ended")
		}
	}
}

// unmount unmounts everything. Containers keep their mounts. A program that reads
// the folder may keep it busy for a moment; after half of the limit the mount is
// only detached, and goes when that program is done.
func (all mounts) unmount(ctx context.Context, limit time.Duration) error {
	detachAt := time.Now().Add(limit / 2)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.New("it stays busy"))
	defer cancel()
	var errs []error
	for _, m := range all {
		errs = append(errs, m.unmount(ctx, detachAt))
	}
	return errors.Join(errs...)
}

// mounted compares device numbers: a tmpfs always has its own, even within another
// tmpfs.
func (m mount) mounted() (bool, error) {
	var inner, outer unix.Stat_t
	err := unix.Lstat(m.path, &inner)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err = errors.Join(err, unix.Lstat(filepath.Dir(m.path), &outer)); err != nil {
		return false, fmt.Errorf("look at %s: %w", m.path, err)
	}
	return inner.Dev != outer.Dev, nil
}

func (m mount) unmount(ctx context.Context, detachAt time.Time) error {
	flags := unix.UMOUNT_NOFOLLOW
	var last error
	err := wait.Until(ctx, func() (bool, error) {
		if mounted, err := m.mounted(); !mounted || err != nil {
			return true, err
		}
		last = unix.Unmount(m.path, flags)
		switch {
		case last == nil:
			return false, nil // mounts may be stacked
		case !errors.Is(last, unix.EBUSY):
			return true, last
		case time.Now().After(detachAt):
			flags |= unix.MNT_DETACH
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("unmount %s: %w", m.path, errors.Join(err, last))
	}
	return nil
}
