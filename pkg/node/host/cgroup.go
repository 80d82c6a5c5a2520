// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoCgroup means that this process cannot name the cgroups of version 2 of the host's processes: there are none, or it sees
// its own only.
var ErrNoCgroup = errors.New("the host's cgroups of version 2 are not here")

// Cgroup returns the folder of a process's cgroup of version 2, given the PID that the process has here. It fails unless the
// kernel lists the process there: a path of another cgroup namespace may name another cgroup here.
func (r Roots) Cgroup(pid int) (string, error) {
	root := filepath.Join(r.Complete().Sys, "fs/cgroup")
	var fs unix.Statfs_t
	if err := unix.Statfs(root, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return "", fmt.Errorf("%s is no hierarchy of cgroups of version 2: %w", root, errors.Join(ErrNoCgroup, err))
	}
	name, err := cgroupOf(pid)
	if err != nil {
		return "", err
	}
	folder := filepath.Join(root, name)
	procs, err := os.ReadFile(filepath.Join(folder, "cgroup.procs"))
	if err != nil || !slices.Contains(strings.Fields(string(procs)), strconv.Itoa(pid)) {
		return "", fmt.Errorf("process %d is not in %s: %w", pid, folder, errors.Join(ErrNoCgroup, err))
	}
	return folder, nil
}

// OwnCgroup returns the cgroup of this process, if it sees those of the whole host.
func (r Roots) OwnCgroup() (string, error) {
	if first, err := cgroupOf(1); err != nil || strings.HasPrefix(first, "/..") {
		return "", fmt.Errorf("this process has a cgroup namespace, in which the host's first process is in %q: %w", first, errors.Join(ErrNoCgroup, err))
	}
	return r.Cgroup(os.Getpid())
}

// cgroupOf returns the path of a process's cgroup in the hierarchy of version 2.
func cgroupOf(pid int) (string, error) {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", fmt.Errorf("find out the cgroup of process %d: %w", pid, err)
	}
	for line := range strings.Lines(string(text)) {
		if name, is := strings.CutPrefix(strings.TrimSpace(line), "0::"); is {
			return name, nil
		}
	}
	return "", fmt.Errorf("process %d is in no cgroup of version 2: %w", pid, ErrNoCgroup)
}
