// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// shrinkTime is enough for 2^18 files, more than any tenant can have in one file system.
const shrinkTime = 5 * time.Second

// tmpfsInodes bounds how many files one file system takes of the kernel's memory.
const tmpfsInodes = 1024

// TmpfsFlags are those of every file system that tenants can write to: nothing in it is
// run, is a device, or leads elsewhere. Before Linux 5.10 links lead elsewhere.
const TmpfsFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSYMFOLLOW

// MountTmpfs makes a folder, if there is none, and mounts a file system in memory on it
// that holds the given number of bytes at most. One that is mounted already stays. label
// is as for Tmpfs.
func MountTmpfs(path string, bytes int64, label string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	mounted, err := IsMountPoint(path)
	if err != nil || mounted {
		return err
	}
	options := fmt.Sprintf("size=%d,nr_inodes=%d,mode=0755", bytes, tmpfsInodes)
	if err := Tmpfs("partage", path, options, label); err != nil {
		return fmt.Errorf("mount a tmpfs of %d bytes on %s: %w", bytes, path, err)
	}
	return nil
}

// ShrinkTmpfs empties a file system in memory and shrinks it to a page. A process that keeps a descriptor of it after its
// claim has ended then neither holds nor writes more of the node's memory than that. It fails where something cannot be emptied:
// what was unlinked and is still open, has a lease, or is immutable. Then nothing can be added to that.
func ShrinkTmpfs(ctx context.Context, path string) error {
	var is unix.Statfs_t
	if err := unix.Statfs(path, &is); err != nil || is.Type != unix.TMPFS_MAGIC {
		return errors.Join(fmt.Errorf("shrink %s: it is no file system in memory", path), err)
	}
	folder, err := openFolder(unix.AT_FDCWD, path)
	if err == nil {
		err = flatten(ctx, folder, func(folder *os.File, name string) (bool, error) {
			flags := unix.O_WRONLY | unix.O_TRUNC | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
			if fd, err := unix.Openat(int(folder.Fd()), name, flags, 0); err == nil {
				_ = unix.Close(fd)
			}
			return unlink(folder, name)
		})
	}
	var left unix.Statfs_t
	if statErr := unix.Statfs(path, &left); statErr != nil {
		return fmt.Errorf("shrink %s: %w", path, errors.Join(err, statErr))
	}
	page := uint64(os.Getpagesize())
	size := max(page, (left.Blocks-left.Bfree)*uint64(left.Bsize))
	for _, options := range []string{fmt.Sprintf("size=%d", size), fmt.Sprintf("nr_inodes=%d", left.Files-left.Ffree)} {
		if mountErr := unix.Mount("", path, "", TmpfsFlags|unix.MS_REMOUNT, options); mountErr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", options, mountErr))
		}
	}
	if err == nil && size > page {
		err = fmt.Errorf("somebody keeps %d KiB", size>>10)
	}
	if err != nil {
		return fmt.Errorf("empty and shrink %s: %w", path, err)
	}
	return nil
}

// RemoveTmpfs unmounts a file system in memory, after it has shrunk it as far as possible, and removes the folder. No folder is a
// success. Another file system that somebody has mounted there is unmounted as it is.
func RemoveTmpfs(path string) error {
	for {
		mounted, err := IsMountPoint(path)
		if err != nil {
			return err
		}
		if !mounted {
			err := os.Remove(path)
			if errors.Is(err, unix.ENOTEMPTY) { // then nothing is mounted there: that would be busy
				err = os.RemoveAll(path)
			}
			return ignoreAbsent(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), shrinkTime)
		err = ShrinkTmpfs(ctx, path)
		if cancel(); err != nil { // what somebody keeps must not keep the folder
			klog.Background().Error(err, "Somebody keeps memory of what has ended")
		}
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

// IsMountPoint reports whether a file system in memory is mounted on a path: it has a device number of its own, even within
// another one.
func IsMountPoint(path string) (bool, error) {
	var here, above unix.Stat_t
	err := unix.Lstat(path, &here)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err = errors.Join(err, unix.Lstat(filepath.Dir(path), &above)); err != nil {
		return false, fmt.Errorf("look at %s: %w", path, err)
	}
	return here.Dev != above.Dev, nil
}
