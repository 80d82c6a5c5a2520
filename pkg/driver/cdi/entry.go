// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// deviceEntry returns the part of a spec for one device. Hooks keep their order; the
// rest is sorted.
func deviceEntry(claimUID types.UID, d Device) (specs.Device, error) {
	entry := specs.Device{Name: string(claimUID) + "-" + d.Name}
	if len(d.Nodes) == 0 {
		return entry, fmt.Errorf("device %s has no device nodes", d.Name)
	}
	edits := &entry.ContainerEdits
	edits.Env = slices.Sorted(slices.Values(d.Env))
	nodes := slices.SortedFunc(slices.Values(d.Nodes), func(a, b Node) int { return cmp.Compare(a.Path, b.Path) })
	for _, n := range nodes {
		if n.Major <= 0 || n.Minor < 0 {
			return entry, fmt.Errorf("device %s: node %s has no device number", d.Name, n.Path)
		}
		node := &specs.DeviceNode{
			Path: n.Path, Type: "c", Major: n.Major, Minor: n.Minor,
			Permissions: cmp.Or(n.Permissions, "rw"),
		}
		if n.HostPath != n.Path {
			node.HostPath = n.HostPath
		}
		edits.DeviceNodes = append(edits.DeviceNodes, node)
	}
	mounts := slices.SortedFunc(slices.Values(d.Mounts), func(a, b Mount) int { return cmp.Compare(a.ContainerPath, b.ContainerPath) })
	for i, m := range mounts {
		if i > 0 && m.ContainerPath == mounts[i-1].ContainerPath {
			return entry, fmt.Errorf("device %s: two mounts at %s", d.Name, m.ContainerPath)
		}
		mount, err := m.spec()
		if err != nil {
			return entry, fmt.Errorf("device %s: %w", d.Name, err)
		}
		edits.Mounts = append(edits.Mounts, mount)
	}
	for _, h := range d.Hooks {
		hook, err := h.spec()
		if err != nil {
			return entry, fmt.Errorf("device %s: %w", d.Name, err)
		}
		edits.Hooks = append(edits.Hooks, hook)
	}
	return entry, nil
}

// spec refuses paths that a runtime would change, or refuse only when the first
// container starts.
func (m Mount) spec() (*specs.Mount, error) {
	for side, path := range map[string]string{"of the host": m.HostPath, "in the container": m.ContainerPath} {
		if !isCleanAbs(path) || path == "/" {
			return nil, fmt.Errorf("mount of %q at %q: want an absolute path %s, without dots", m.HostPath, m.ContainerPath, side)
		}
	}
	access := "rw"
	if m.ReadOnly {
		access = "ro"
	}
	options := []string{"bind", access, "nosuid", "nodev"}
	if m.NoExec {
		options = append(options, "noexec")
	}
	if m.NoFollow {
		options = append(options, "nosymfollow")
	}
	return &specs.Mount{HostPath: m.HostPath, ContainerPath: m.ContainerPath, Options: options}, nil
}

func (h Hook) spec() (*specs.Hook, error) {
	if !isCleanAbs(h.Path) {
		return nil, fmt.Errorf("hook %q: want an absolute path of the host, without dots", h.Path)
	}
	if len(h.Args) == 0 {
		return nil, fmt.Errorf("hook %s has no arguments: want the program's name at least", h.Path)
	}
	hook := &specs.Hook{HookName: cdiapi.CreateRuntimeHook, Path: h.Path, Args: slices.Clone(h.Args)}
	confine(hook)
	return hook, nil
}

// isCleanAbs reports whether a path is absolute and without dots.
func isCleanAbs(path string) bool { return filepath.IsAbs(path) && filepath.Clean(path) == path }
