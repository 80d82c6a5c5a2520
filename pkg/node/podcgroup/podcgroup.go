// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package podcgroup tells by the names of cgroups to which pod and container they belong.
// The kubelet names the cgroup of a pod and the container runtime those of its containers:
// "kubepods/burstable/podUID/ID" with the cgroupfs driver, and
// "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice/RUNTIME-ID.scope"
// with that of systemd, where _ replaces the hyphens of the UID. All that may be below the
// cgroup of a node that is a container itself, as with kind.
//
// A container may make cgroups below its own and name them as it likes. So of several that
// resemble a pod's the outermost counts.
package podcgroup

import (
	"io/fs"
	"iter"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Pod is what the cgroups of a process say of its pod.
type Pod struct {
	// UID is that of the pod's metadata. A static pod's has no hyphens.
	UID string
	// Container is the ID of the container, "" if the process is in none or that is not told.
	Container string
	// Cgroup is the pod's own in the hierarchy of version 2, "" if it has none there or the
	// reader cannot name it.
	Cgroup string
}

var (
	// ofPod matches the name of a pod's cgroup. A runtime with the cgroupfs driver takes the
	// name that is meant for systemd's as it is: "kubepods-podUID.slice:cri-containerd:ID".
	ofPod = regexp.MustCompile(`^(?:.*-)?pod([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})(?:\.slice)?(:[^/]*)?$`)
	// ofContainer matches the name of a container's cgroup.
	ofContainer = regexp.MustCompile(`^(?:[a-z]+-)*([0-9a-f]{64})(?:\.scope)?$`)
	// ofAnyPod matches the name of the cgroup above those of pods. With a root of the
	// kubelet's own there is another name before it.
	ofAnyPod = regexp.MustCompile(`^(?:.*-)?kubepods(?:[-.].*)?$`)
)

// deleted ends the path of a cgroup that has gone.
const deleted = " (deleted)"

// Lines returns the cgroups in a process's file "cgroup" of procfs: the path in each
// hierarchy, with its controllers, of which version 2 has none.
func Lines(file string) iter.Seq2[string, string] {
	return func(yield func(controllers, path string) bool) {
		for line := range strings.Lines(file) {
			// hierarchy:controllers:path
			fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(fields) == 3 && !yield(fields[1], fields[2]) {
				return
			}
		}
	}
}

// Find returns the pod of a process by its file "cgroup" of procfs, if that tells which it is.
func Find(file string) (Pod, bool) {
	var pod Pod
	if !strings.Contains(file, "pod") {
		return pod, false // most processes are in none
	}
	for controllers, cgroup := range Lines(file) {
		found, ok := parse(strings.TrimSuffix(cgroup, deleted))
		if !ok {
			continue
		}
		if pod.UID == "" {
			pod.UID, pod.Container = found.UID, found.Container
		}
		if controllers == "" && found.UID == pod.UID {
			pod.Cgroup = found.Cgroup
		}
	}
	return pod, pod.UID != ""
}

// OfProcess returns the pod of a process, if its cgroup says which that is. The procfs has the
// processes of the host.
func OfProcess(procfs fs.FS, pid int) (Pod, bool) {
	file, err := fs.ReadFile(procfs, path.Join(strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return Pod{}, false
	}
	return Find(string(file))
}

// OOMKills returns how many processes of the pod the kernel has killed because memory ran out. It is not known with cgroups of
// version 1, nor after the pod's end. The procfs has the processes of the host.
func (p Pod) OOMKills(procfs fs.FS) (int, bool) {
	if p.Cgroup == "" {
		return 0, false
	}
	events, err := fs.ReadFile(procfs, path.Join("1/root/sys/fs/cgroup", p.Cgroup, "memory.events"))
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(events)) {
		if count, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			n, err := strconv.Atoi(count)
			return n, err == nil
		}
	}
	return 0, false
}

// In reports whether a process is in a pod, whichever that is. The procfs has the processes of the host.
func In(procfs fs.FS, pid int) bool {
	file, err := fs.ReadFile(procfs, path.Join(strconv.Itoa(pid), "cgroup"))
	return err == nil && inPod(string(file))
}

func inPod(file string) bool {
	for _, cgroup := range Lines(file) {
		for name := range strings.SplitSeq(strings.TrimSuffix(cgroup, deleted), "/") {
			if ofAnyPod.MatchString(name) || ofPod.MatchString(name) {
				return true
			}
		}
	}
	return false
}

// parse reads the path of a cgroup.
func parse(cgroup string) (Pod, bool) {
	names := strings.Split(cgroup, "/")
	for i, name := range names {
		found := ofPod.FindStringSubmatch(name)
		if found == nil {
			continue
		}
		pod := Pod{UID: strings.ReplaceAll(found[1], "_", "-")}
		below := found[2][strings.LastIndexByte(found[2], ':')+1:]
		if found[2] == "" {
			if i+1 < len(names) {
				below = names[i+1]
			}
			if at := strings.Join(names[:i+1], "/"); fromRoot(at) {
				pod.Cgroup = at
			}
		}
		if id := ofContainer.FindStringSubmatch(below); id != nil {
			pod.Container = id[1]
		}
		return pod, true
	}
	return Pod{}, false
}

// fromRoot reports whether the path of a cgroup begins at the root of its hierarchy. A
// reader in a cgroup namespace gets paths of other cgroups that begin with "/..".
func fromRoot(cgroup string) bool {
	below, ok := strings.CutPrefix(cgroup, "/")
	return ok && (below == "" || filepath.IsLocal(below))
}
