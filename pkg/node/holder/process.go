// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/podcgroup"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// Process is one of those that keep a GPU in use.
type Process struct {
	PID int
	// Start is when it was started, since the machine was, or negative for a process that has ended.
	Start time.Duration
	// name is what the kernel calls the program, which it may choose itself; "" if it
	// has ended meanwhile.
	name string
	// nodes are the device nodes of the GPU that it has open, in /dev, whatever the root
	// below which it has them.
	nodes []string
	// Ended means that the process is no more, and nobody waits for it. The driver lists it for as long as it has memory on a GPU,
	// which somebody keeps who has the descriptor that it was taken with, also in the queue of a socket (seen on an H100 with
	// driver 580).
	Ended bool
	// Pod is the UID of the pod, and container the ID, that its cgroup names, "" outside of pods.
	Pod, container string
}

// procfs is a procfs with the processes of the host. Nothing in it belongs to a tenant:
// only links are read, and files that the kernel makes up without asking the process.
type procfs struct {
	path string
	// roots are those below which the driver's nodes are, beside a process's own.
	roots []string
}

// openers lists the processes that have device nodes of the driver open, by PID.
// The node of a GPU is known by its name, and by its number where it has another one: its container
// may have ended, or somebody may have made it elsewhere. What has no pod is not examined if nobody asks for it: the
// cgroup of a process is one file, and what it has open may be thousands.
func (p procfs) openers(inPods bool) ([]Process, error) {
	entries, err := os.ReadDir(p.path)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var found []Process
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() || inPods && p.pod(pid).UID == "" {
			continue
		}
		if nodes := p.nodes(pid); len(nodes) > 0 {
			one := p.process(pid)
			one.nodes = nodes
			found = append(found, one)
		}
	}
	slices.SortFunc(found, func(a, b Process) int { return a.PID - b.PID })
	return found, nil
}

// nodes lists the nodes of the driver that a process has open. One that ends meanwhile has none.
func (p procfs) nodes(pid int) []string {
	folder := p.of(pid, "fd")
	open, err := os.ReadDir(folder)
	if err != nil {
		return nil
	}
	roots := p.roots
	if own, err := os.Readlink(p.of(pid, "root")); err == nil {
		roots = append(slices.Clone(roots), own)
	}
	var nodes []string
	for _, file := range open {
		path, err := os.Readlink(filepath.Join(folder, file.Name()))
		if err != nil {
			continue
		}
		called := nodePath(path, roots)
		if called == "" && !filepath.IsAbs(path) {
			continue // a socket or a pipe
		}
		if node := nodeOf(filepath.Join(folder, file.Name()), called); node != "" {
			nodes = append(nodes, node)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// nodePath returns the path of a device node of the driver below one of the roots, or ""
// for that of another file.
func nodePath(path string, roots []string) string {
	node := driverNode.FindString(path)
	root := strings.TrimSuffix(path, node)
	if node == "" || root != "" && !slices.Contains(roots, root) {
		return ""
	}
	return node
}

// gpuMajor is the number of NVIDIA's driver among those of character devices.
const gpuMajor = 195

// nodeOf returns the node of the driver that an open file is, or "" for another file. Anybody can call a file like a node: one
// that is called so, unless that is "", is the node if its number is not known to be another's.
func nodeOf(file, called string) string {
	st, err := process.StatOpen(file)
	node := gpuNode(int(st.Rdev_minor))
	switch {
	case err != nil:
		return called
	case st.Mode&unix.S_IFMT != unix.S_IFCHR:
		return ""
	case st.Rdev_major == gpuMajor && (called == "" || called == node):
		return node
	case strings.HasSuffix(called, "/nvidia-cap"+strconv.Itoa(int(st.Rdev_minor))):
		return called
	}
	return ""
}

func gpuNode(minor int) string { return "/dev/nvidia" + strconv.Itoa(minor) }

var driverNode = regexp.MustCompile(`/dev/(nvidia[0-9]+|nvidia-caps/nvidia-cap[0-9]+)$`)

func (p procfs) of(pid int, name string) string {
	return filepath.Join(p.path, strconv.Itoa(pid), name)
}

// process reads what is known of a process.
func (p procfs) process(pid int) Process {
	one := Process{PID: pid, Start: -1}
	if id, err := process.IdentifyIn(p.path, pid); err == nil {
		one.Start = time.Duration(id.Start) * tick
	}
	_, err := os.Lstat(filepath.Join(p.path, strconv.Itoa(pid)))
	one.Ended = errors.Is(err, fs.ErrNotExist)
	if name, err := os.ReadFile(p.of(pid, "comm")); err == nil {
		one.name = strings.TrimSuffix(string(name), "\n")
	}
	pod := p.pod(pid)
	one.Pod, one.container = pod.UID, pod.Container
	return one
}

// pod is that of a process, or the zero value. A node has thousands of processes, and a claim waits for the last of them: an
// os.File costs several times what the kernel takes to answer.
func (p procfs) pod(pid int) podcgroup.Pod {
	file, err := unix.Open(p.of(pid, "cgroup"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return podcgroup.Pod{}
	}
	defer func() { _ = unix.Close(file) }()
	var text []byte
	buffer := make([]byte, 4096)
	for {
		n, err := unix.Read(file, buffer)
		if err != nil || n == 0 {
			break // one that has ended has no cgroup
		}
		text = append(text, buffer[:n]...)
	}
	pod, _ := podcgroup.Find(string(text))
	return pod
}

// tick is the kernel's unit of time in procfs, on all machines that Go runs on.
const tick = time.Second / 100

// shownID is how much of a container's ID crictl shows, which is enough to find it.
const shownID = 13

// shownNodes is how many device nodes of a process are named.
const shownNodes = 3

func shownOf(nodes []string) []string {
	if len(nodes) <= shownNodes {
		return nodes
	}
	return append(slices.Clone(nodes[:shownNodes]), strconv.Itoa(len(nodes)-shownNodes)+" more")
}

// Text describes a process: "process 4711 (train, pod default/a, container 0123456789abc,
// has /dev/nvidia0 open)". The name of its pod is "" where it is not known.
func (p Process) Text(podName string) string {
	var about []string
	if p.name != "" {
		about = append(about, quote.Name(p.name))
	}
	if p.Ended {
		about = append(about, "has ended, its memory is still held")
	}
	switch {
	case podName != "":
		about = append(about, "pod "+quote.Name(podName))
	case p.Pod != "":
		about = append(about, "pod with UID "+p.Pod)
	}
	if p.container != "" {
		about = append(about, "container "+p.container[:shownID])
	}
	if len(p.nodes) > 0 {
		about = append(about, "has "+strings.Join(shownOf(p.nodes), " and ")+" open")
	}
	text := "process " + strconv.Itoa(p.PID)
	if len(about) == 0 {
		return text
	}
	return text + " (" + strings.Join(about, ", ") + ")"
}
