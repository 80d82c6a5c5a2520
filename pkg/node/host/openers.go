// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Openers lists the processes that have a device node open, for example "/dev/nvidia0", by its number: containers have nodes of
// their own. Processes that end meanwhile are passed over. It sees all processes only where the proc root is that of the host.
func (r Roots) Openers(path string) ([]int, error) {
	major, minor, err := r.CharDevice(path)
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(r.Complete().Proc, "[0-9]*", "fd", "*"))
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, file := range files {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(file))))
		if err != nil || pid == os.Getpid() {
			continue
		}
		// The kernel answers by itself: a process may have files of a server that does not.
		var st unix.Statx_t
		err = unix.Statx(unix.AT_FDCWD, file, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st)
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && int64(st.Rdev_major) == major && int64(st.Rdev_minor) == minor {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}
