// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package tenant tells what a process is to the node: whether it is in a pod, and which
// devices it has open. The process may do its worst to keep that from being found out.
package tenant

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/wait"
)

// procRoot is where the supervisor sees the processes of the host.
const procRoot = "/proc"

// lookLimit is how long a look at the files of a process may take.
const lookLimit = time.Second

var looks wait.Looks[int, map[uint64]string]

// DeviceNodes returns the character devices that a process has open, by device
// number, with the path by which the process knows each. A process may have files of a
// server that does not answer, and the look at them does not end then; that is an error.
func DeviceNodes(pid int) (map[uint64]string, error) {
	nodes, err := looks.Do(pid, lookLimit, func() (map[uint64]string, error) { return deviceNodes(pid) })
	if errors.Is(err, wait.ErrNoAnswer) {
		return nil, fmt.Errorf("look at the open files of PID %d: one of them does not answer", pid)
	}
	return maps.Clone(nodes), err
}

func deviceNodes(pid int) (map[uint64]string, error) {
	dir := filepath.Join(procRoot, strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("look at the open files of PID %d: %w", pid, err)
	}
	nodes := map[uint64]string{}
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		// A file that cannot be looked at was closed meanwhile.
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
			continue
		}
		if name, err := os.Readlink(path); err == nil {
			nodes[st.Rdev] = name
		}
	}
	return nodes, nil
}

// podCgroup matches the cgroups of pods: kubepods with the cgroupfs driver,
// kubepods.slice with systemd's, with another name before it below a root of the
// kubelet's own. A process in another cgroup namespace may see only the end of that.
var podCgroup = regexp.MustCompile(`(^|[/-])(kubepods([-./]|$)|pod[0-9a-f]{8}[-_]?[0-9a-f]{4})`)

// InPod reports whether a process is in a pod, by its cgroup.
func InPod(pid int) bool {
	data, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "cgroup"))
	return err == nil && inPod(string(data))
}

func inPod(cgroups string) bool {
	for line := range strings.Lines(cgroups) {
		// hierarchy:controllers:path
		if fields := strings.SplitN(strings.TrimSpace(line), ":", 3); len(fields) == 3 && podCgroup.MatchString(fields[2]) {
			return true
		}
	}
	return false
}
