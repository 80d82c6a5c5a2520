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

// emptyTime is enough for 2^18 files, more than any tenant can have in one file system.
const emptyTime = 5 * time.Second

// tmpfsFlags are those of every file system that tenants can write to: nothing in it is
// run, is a device, or leads elsewhere. Before Linux 5.10 links lead elsewhere.
const tmpfsFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSYMFOLLOW

// TmpfsFiles returns how many files and folders a file system of some size may have: one for 16 KiB. Each takes a KiB of the
// kernel's memory beside its content, as Linux itself reckons.
func TmpfsFiles(bytes int64) int64 { return min(max(bytes>>14, 256), 1<<18) }

// TmpfsCost returns what a file system of some size can take of the node's memory.
func TmpfsCost(bytes int64) int64 { return bytes + TmpfsFiles(bytes)<<10 }

// MountTmpfs makes a folder, if there is none, and mounts a file system in memory on it
// that holds the given number of bytes at most, and that only root can write to. One that is mounted already stays. source is its
// name for people, label its SELinux context, empty for that of the node's policy.
func MountTmpfs(source, path string, bytes int64, label string) error {
	err := os.MkdirAll(path, 0o755)
	mounted := false
	if err == nil {
		mounted, err = IsMountPoint(path)
	}
	if err == nil && !mounted {
		options := fmt.Sprintf("size=%d,nr_inodes=%d,mode=0755", bytes, TmpfsFiles(bytes))
		if label != "" {
			options += fmt.Sprintf(`,context="%s"`, label)
		}
		err = unix.Mount(source, path, "tmpfs", tmpfsFlags, options)
		if err != nil && label != "" {
			err = fmt.Errorf(`with the SELinux context %q: %w (--selinux-context (SELINUX_CONTEXT) sets another one, or "%s")`, label, err, SELinuxNone)
		}
	}
	if err != nil {
		return fmt.Errorf("mount a tmpfs of %d bytes on %s: %w", bytes, path, err)
	}
	return nil
}

// EmptyTmpfs removes all that is in a file system in memory, and reports whether somebody keeps something that was in it. Files are
// truncated first, so that who has one open keeps none of the node's memory. What was unlinked before, or has a lease, stays.
func EmptyTmpfs(ctx context.Context, path string) (kept bool, err error) {
	var is unix.Statfs_t
	if err := unix.Statfs(path, &is); err != nil || is.Type != unix.TMPFS_MAGIC {
		return false, errors.Join(fmt.Errorf("empty %s: it is no file system in memory", path), err)
	}
	folder, err := openFolder(unix.AT_FDCWD, path)
	if err == nil {
		err = flatten(ctx, folder, truncate)
	}
	if err = errors.Join(err, unix.Statfs(path, &is)); err != nil {
		return false, fmt.Errorf("empty %s: %w", path, err)
	}
	return is.Files-is.Ffree > 1, nil // one is its root
}

// truncate is a remove.
func truncate(folder *os.File, name string) (bool, error) {
	flags := unix.O_WRONLY | unix.O_TRUNC | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	if fd, err := unix.Openat(int(folder.Fd()), name, flags, 0); err == nil {
		_ = unix.Close(fd)
	}
	return unlink(folder, name)
}

// RemoveTmpfs empties a file system in memory of which containers have folders, makes it as small as a page, unmounts it, and removes
// the folder. A process that keeps a descriptor of it can then neither make files in it nor write more than that; if it kept
// what cannot be emptied, no more than the file system had room for. No folder is a success. Another file system
// that somebody has mounted there is unmounted as it is.
func RemoveTmpfs(path string) error {
	mounted, err := IsMountPoint(path)
	if err == nil && mounted {
		ctx, cancel := context.WithTimeout(context.Background(), emptyTime)
		defer cancel()
		_, err := EmptyTmpfs(ctx, path)
		if err == nil {
			err = unix.Mount("", path, "", tmpfsFlags|unix.MS_REMOUNT, fmt.Sprintf("size=%d", os.Getpagesize()))
		}
		if err != nil { // what somebody keeps must not keep the folder
			klog.Background().Error(err, "Somebody may keep memory of what has ended", "folder", path)
		}
	}
	return errors.Join(err, Unmount(path))
}

// Unmount unmounts a file system in memory as it is, with all that somebody has mounted over it, and removes the folder.
func Unmount(path string) error {
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
		return false, fmt.Errorf("read %s: %w", path, err)
	}
	return here.Dev != above.Dev, nil
}
