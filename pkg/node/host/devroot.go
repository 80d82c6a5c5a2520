// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// AutoDev as Roots.Dev stands for the driver root if it has the driver's device nodes, and
// for the host's root otherwise. Driver containers, as those of NVIDIA's GPU Operator, have
// a /dev of their own, and may come and go at any time. So this is decided anew for every
// use of a node.
const AutoDev = "auto"

// DevRoot is a folder whose dev holds device nodes.
type DevRoot struct {
	// Path is the folder as this process sees it.
	Path string
	// OnHost is the same as the container runtime sees it.
	OnHost string
}

// Folder returns where the nodes are on the host, for example "/run/nvidia/driver/dev".
func (d DevRoot) Folder() string { return filepath.Join(d.OnHost, "dev") }

// RequiredNodes are the device nodes without which no CUDA program runs, whatever its GPU.
func RequiredNodes() []string { return []string{"/dev/nvidiactl", "/dev/nvidia-uvm"} }

// Node is a character device of the host.
type Node struct {
	Root         DevRoot
	Major, Minor int64
}

// DevRoot returns where the driver's device nodes are at the moment. With AutoDev it is
// the first place that has all RequiredNodes, or else the first of those that have most.
func (r Roots) DevRoot() DevRoot { return byCompleteness(r.devRoots())[0] }

// devRoots are the places that may have device nodes, in order of preference.
func (r Roots) devRoots() []DevRoot {
	r = r.Complete()
	if r.Dev != AutoDev {
		return []DevRoot{{Path: r.Dev, OnHost: r.HostDev}}
	}
	places := []DevRoot{{Path: "/", OnHost: "/"}}
	if filepath.Clean(r.HostDriver) != "/" {
		places = append([]DevRoot{{Path: r.Driver, OnHost: r.HostDriver}}, places...)
	}
	return places
}

// byCompleteness sorts places by how many of the RequiredNodes they have, most first.
func byCompleteness(places []DevRoot) []DevRoot {
	present := func(d DevRoot) (nodes int) {
		for _, path := range RequiredNodes() {
			if _, err := d.node(path); err == nil {
				nodes++
			}
		}
		return nodes
	}
	return slices.SortedStableFunc(slices.Values(places), func(a, b DevRoot) int { return present(b) - present(a) })
}

// Node returns a device node of the host, for example "/dev/nvidia0". With AutoDev it may
// be elsewhere than at DevRoot, if it is not there. The error wraps fs.ErrNotExist for a
// missing node, and ErrNotCharDevice for any other file; it says what to do about it.
func (r Roots) Node(path string) (Node, error) {
	places := r.devRoots()
	for _, place := range byCompleteness(places) {
		if node, err := place.node(path); !errors.Is(err, fs.ErrNotExist) {
			return node, err
		}
	}
	return Node{}, missing(path, places)
}

func (d DevRoot) node(path string) (Node, error) {
	full := filepath.Join(d.Path, path)
	var st unix.Stat_t
	if err := unix.Stat(full, &st); err != nil {
		return Node{}, fmt.Errorf("device node %s: %w", full, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return Node{}, fmt.Errorf("device node %s: %w", full, ErrNotCharDevice)
	}
	return Node{Root: d, Major: int64(unix.Major(st.Rdev)), Minor: int64(unix.Minor(st.Rdev))}, nil
}

// missing is the error for a node that no place has. It names the places as the host does.
func missing(path string, places []DevRoot) error {
	var folders []string
	for _, place := range places {
		folders = append(folders, filepath.Join(place.OnHost, filepath.Dir(path)))
	}
	where := "is not in " + folders[0]
	if len(folders) > 1 {
		where = "is neither in " + strings.Join(folders, " nor in ")
	}
	return fmt.Errorf("the device node %s %s on this node (%w): %s", filepath.Base(path), where, fs.ErrNotExist, remedy(path))
}

// remedy says what makes a node. What nvidia-modprobe does is in its manual page.
func remedy(path string) string {
	const operator = "with NVIDIA's GPU Operator, see whether the driver's pod on this node is ready"
	switch name := filepath.Base(path); {
	case strings.HasPrefix(name, "nvidia-uvm"):
		return "nvidia-modprobe -u -c=0 on the host loads its kernel module and makes it; " + operator
	case name == "nvidiactl":
		return "nvidia-modprobe -c=0, nvidia-smi or nvidia-persistenced on the host makes it; " + operator
	default:
		return "nvidia-modprobe -c=" + strings.TrimPrefix(name, "nvidia") + ", nvidia-smi or nvidia-persistenced on the host makes it; " + operator
	}
}
