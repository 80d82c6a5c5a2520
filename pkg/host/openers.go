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

// Openers lists the processes that have a device node open, for example "/dev/nvidia0",
// by its number: containers have nodes of their own. Processes that end meanwhile are
// passed over. It sees all processes only where the proc root is that of the host.
func (r Roots) Openers(path string) ([]int, error) {
	major, minor, err := r.CharDevice(path)
	if err != nil {
		return nil, err
	}
	number := unix.Mkdev(uint32(major), uint32(minor))
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
		var st unix.Stat_t
		if unix.Stat(file, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == number {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}
