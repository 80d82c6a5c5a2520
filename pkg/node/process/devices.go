// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// mostFiles is how many open files of a process are read. One that has more, which may be a million, has those of a
// GPU among the first.
const mostFiles = 4096

// Devices returns the character devices that a process has open, by device number, with the path by which the process knows
// each, as far as they are among its first 4096 files.
func Devices(pid int) (map[uint64]string, error) {
	devices := map[uint64]string{}
	err := eachDevice(pid, func(number uint64, file string) bool {
		if path, err := os.Readlink(file); err == nil {
			devices[number] = path
		}
		return true
	})
	return devices, err
}

// HasDevice reports whether a process is known to have one of these character devices open, as Devices does.
func HasDevice(pid int, devices map[uint64]bool) (has bool) {
	err := eachDevice(pid, func(number uint64, _ string) bool {
		has = has || devices[number]
		return !has
	})
	return err == nil && has
}

// StatOpen reads the type and the device number of an open file, by its path in procfs. The kernel answers by itself: a process
// may have files of a server, or of a tenant's file system, that does not.
func StatOpen(file string) (st unix.Statx_t, err error) {
	err = unix.Statx(unix.AT_FDCWD, file, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st)
	return st, err
}

// eachDevice calls a function for the character devices that a process has open, as long as it returns true.
func eachDevice(pid int, do func(number uint64, file string) bool) error {
	folder, err := os.Open(filepath.Join(procRoot, strconv.Itoa(pid), "fd"))
	if err != nil {
		return fmt.Errorf("read the open files of PID %d: %w", pid, err)
	}
	defer func() { _ = folder.Close() }()
	names, err := folder.Readdirnames(mostFiles) // the lowest first
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read the open files of PID %d: %w", pid, err)
	}
	for _, name := range names {
		file := filepath.Join(folder.Name(), name)
		st, err := StatOpen(file) // one that cannot be read was closed meanwhile
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && !do(unix.Mkdev(st.Rdev_major, st.Rdev_minor), file) {
			break
		}
	}
	return nil
}
