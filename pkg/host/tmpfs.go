// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

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
	mounted, err := isMountPoint(path)
	if err != nil || mounted {
		return err
	}
	options := fmt.Sprintf("size=%d,nr_inodes=%d,mode=0755", bytes, tmpfsInodes)
	if err := Tmpfs("partage", path, options, label); err != nil {
		return fmt.Errorf("mount a tmpfs of %d bytes on %s: %w", bytes, path, err)
	}
	return nil
}

// RemoveTmpfs unmounts what MountTmpfs has mounted and removes the folder, in which nothing is left then. Containers that
// still use the file system keep it until they end. No folder is a success.
func RemoveTmpfs(path string) error {
	for {
		mounted, err := isMountPoint(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if !mounted {
			return os.RemoveAll(path)
		}
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

func isMountPoint(path string) (bool, error) {
	var here, above unix.Stat_t
	if err := unix.Lstat(path, &here); err != nil {
		return false, fmt.Errorf("%s: %w", path, err)
	}
	if err := unix.Lstat(filepath.Dir(path), &above); err != nil {
		return false, fmt.Errorf("%s: %w", path, err)
	}
	return here.Dev != above.Dev, nil
}
