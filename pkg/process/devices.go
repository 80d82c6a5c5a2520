// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Devices returns the character devices that a process has open, by device number, with the path by which the process knows
// each. The kernel answers by itself: a process may have files of a server that does not.
func Devices(pid int) (map[uint64]string, error) {
	dir := filepath.Join(procRoot, strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("look at the open files of PID %d: %w", pid, err)
	}
	devices := map[uint64]string{}
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		// A file that cannot be looked at was closed meanwhile.
		var st unix.Statx_t
		err := unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st)
		if err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
			continue
		}
		if name, err := os.Readlink(path); err == nil {
			devices[unix.Mkdev(st.Rdev_major, st.Rdev_minor)] = name
		}
	}
	return devices, nil
}
