// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cdi

// Edits are what a device adds to a container. Package edit makes them, one kind
// of edit a file; a device has the sum of several.
type Edits struct {
	Nodes []Node
	// Env are "NAME=value". A container that gets a name from several devices has
	// the value of the last one.
	Env []string
	// Mounts are bind mounts, each with a container path of its own.
	Mounts []Mount
	// Hooks run in this order when the container is created, before its program.
	Hooks []Hook
	// NodesLibrary keeps containers on the CUDA library of the node's driver. Otherwise they use that of their image where it is newer.
	NodesLibrary bool
}

// Append adds the other edits after these.
func (e *Edits) Append(other Edits) {
	e.Nodes = append(e.Nodes, other.Nodes...)
	e.Env = append(e.Env, other.Env...)
	e.Mounts = append(e.Mounts, other.Mounts...)
	e.Hooks = append(e.Hooks, other.Hooks...)
	e.NodesLibrary = e.NodesLibrary || other.NodesLibrary
}

// Device is one device of a claim.
type Device struct {
	// Name is unique in the claim.
	Name string
	Edits
}

// Node is one character device.
type Node struct {
	// Path is the node's path in the container, "/dev/nvidia0".
	Path string
	// HostPath is its path for the container runtime; empty means Path. The node
	// need not exist there.
	HostPath string
	// Major and Minor are the device number.
	Major, Minor int64
	// Permissions are the container's, of "r", "w" and "m". Empty means "rw".
	Permissions string
}

// Mount is a file or folder of the host in the container. A container that gets
// several devices with a mount at the same path has that of the last one.
type Mount struct {
	HostPath, ContainerPath string
	ReadOnly                bool
	// NoExec is for what tenants can write to: no program in it is run. NoFollow is for what several of them write to: no
	// symbolic link in it is followed, where kernel (5.10) and runtime (runc 1.1) know that option.
	NoExec, NoFollow bool
}

// Hook is a program of the host that the runtime runs as a createRuntime hook: in its
// own namespaces, so that paths and PIDs are the host's, with the container's state on
// its standard input. The container does not start if it fails.
type Hook struct {
	Path string
	Args []string // Args[0] is the program's name
}
