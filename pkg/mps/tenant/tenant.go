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
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/podcgroup"
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

// InPod reports whether a process is in a pod, by its cgroup.
func InPod(pid int) bool {
	cgroups, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "cgroup"))
	return err == nil && podcgroup.In(string(cgroups))
}

// Pod is the pod of a process, by its cgroup.
type Pod struct {
	UID string
	// cgroup is the pod's own in the hierarchy of version 2, or empty.
	cgroup string
}

// PodOf returns the pod of a process, if its cgroup says which that is.
func PodOf(pid int) (Pod, bool) {
	pod, ok := podcgroup.OfProcess(os.DirFS(procRoot), pid)
	return Pod{UID: pod.UID, cgroup: pod.Cgroup}, ok
}

// OOMKills returns how many processes of the pod the kernel has killed because memory ran
// out. It is not known with cgroups of version 1, nor after the pod's end.
func (p Pod) OOMKills() (int, bool) {
	if p.cgroup == "" {
		return 0, false
	}
	data, err := os.ReadFile(filepath.Join(procRoot, "1/root/sys/fs/cgroup", p.cgroup, "memory.events"))
	if err != nil {
		return 0, false
	}
	return oomKills(string(data))
}

func oomKills(events string) (int, bool) {
	for line := range strings.Lines(events) {
		if count, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			n, err := strconv.Atoi(count)
			return n, err == nil
		}
	}
	return 0, false
}
