// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package tenant tells what a process is to the node: whether it is in a pod, and which
// devices it has open. The process may do its worst to keep that from being found out.
package tenant

import (
	"errors"
	"fmt"
	"iter"
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

// podUID matches a pod's UID in its cgroup. That of a static pod has no hyphens.
var podUID = regexp.MustCompile(`(?:^|-)pod([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})(?:\.slice)?$`)

// InPod reports whether a process is in a pod, by its cgroup.
func InPod(pid int) bool {
	data, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "cgroup"))
	return err == nil && inPod(string(data))
}

func inPod(cgroups string) bool {
	for path := range paths(cgroups) {
		if podCgroup.MatchString(path) {
			return true
		}
	}
	return false
}

// paths returns the cgroups of a process with the controllers of their hierarchies, of
// which version 2 has none.
func paths(cgroups string) iter.Seq2[string, string] {
	return func(yield func(path, controllers string) bool) {
		for line := range strings.Lines(cgroups) {
			// hierarchy:controllers:path
			fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(fields) == 3 && !yield(fields[2], fields[1]) {
				return
			}
		}
	}
}

// Pod is the pod of a process, by its cgroup.
type Pod struct {
	// UID has no hyphens, see PlainUID.
	UID string
	// cgroup is the pod's own in the hierarchy of version 2, or empty.
	cgroup string
}

// PlainUID returns a pod's UID without what cgroups write differently: hyphens.
func PlainUID(uid string) string { return strings.NewReplacer("-", "", "_", "").Replace(uid) }

// PodOf returns the pod of a process, if its cgroup says which that is.
func PodOf(pid int) (Pod, bool) {
	data, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return Pod{}, false
	}
	return podOf(string(data))
}

func podOf(cgroups string) (Pod, bool) {
	var pod Pod
	for path, controllers := range paths(cgroups) {
		for at := path; at != "/" && at != "."; at = filepath.Dir(at) {
			uid := podUID.FindStringSubmatch(filepath.Base(at))
			if uid == nil {
				continue
			}
			pod.UID = PlainUID(uid[1])
			if controllers == "" && !strings.Contains(path, "..") {
				pod.cgroup = at
			}
		}
	}
	return pod, pod.UID != ""
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
