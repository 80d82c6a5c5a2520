// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/poll"
)

// Group is one folder of a node, in one tree.
type Group struct {
	Hierarchy
	Path string
}

// Groups are a node's folders in all trees.
type Groups []Group

// the kubelet ends without these ("missing controllers").
var needed = []string{"cpu", "cpuset", "memory", "pids"}

// Current returns the trees as this process sees them.
func Current() ([]Hierarchy, error) {
	cgroups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("read the process's control groups: %w", err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read the process's mounts: %w", err)
	}
	return Parse(string(cgroups), string(mounts))
}

// Create makes a node's folders, below those of its cluster, whose id is given. On v1 these lie below the caller's own folder, which
// keeps the machine's limits and accounting; a v2 folder that holds processes cannot give controllers to children, so there they
// lie at the top.
func Create(id, node string) (Groups, error) {
	trees, err := Current()
	if err != nil {
		return nil, err
	}
	unified := !slices.ContainsFunc(trees, func(h Hierarchy) bool { return !h.V2 })
	var groups Groups
	for _, t := range trees {
		path := t.Own
		if unified {
			path = t.Mount
		}
		for _, name := range []string{id, node} {
			if unified {
				if err := Delegate(path); err != nil {
					return nil, err
				}
			}
			path = filepath.Join(path, name)
			if err := t.create(path); err != nil {
				return nil, err
			}
		}
		groups = append(groups, Group{Hierarchy: t, Path: path})
	}
	return groups, nil
}

func (h Hierarchy) create(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return fmt.Errorf("make control group: %w", err)
	}
	if h.Options == "cpuset" || strings.HasPrefix(h.Options, "cpuset,") {
		return copyCPUSet(path)
	}
	return nil
}

// Delegate turns every controller on for the children of dir, as far as it can be.
func Delegate(dir string) error {
	all, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("read control group controllers: %w", err)
	}
	var failed error
	for _, c := range strings.Fields(string(all)) {
		if err := write(filepath.Join(dir, "cgroup.subtree_control"), "+"+c); err != nil && slices.Contains(needed, c) {
			failed = errors.Join(failed, err)
		}
	}
	on, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return fmt.Errorf("read control group controllers: %w", err)
	}
	for _, c := range needed {
		if slices.Contains(strings.Fields(string(on)), c) {
			continue
		}
		hint := ""
		if errors.Is(failed, unix.EBUSY) {
			hint = "; this looks like a container with a control group namespace of its own: run it with the host's (--cgroupns=host)"
		}
		return errors.Join(fmt.Errorf("the node needs the %s controller below %s%s", c, dir, hint), failed)
	}
	return nil
}

// copyCPUSet gives a v1 cpuset its parent's processors and memory nodes; it starts empty and takes no process until then.
func copyCPUSet(path string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(path), file))
		if err != nil {
			return fmt.Errorf("read parent control group: %w", err)
		}
		if err := write(filepath.Join(path, file), strings.TrimSpace(string(b))); err != nil {
			return err
		}
	}
	return nil
}

func write(path, value string) error {
	if err := os.WriteFile(path, []byte(value), 0o644); err != nil { //nolint:gosec // a kernel file
		return fmt.Errorf("write %q to control group: %w", value, err)
	}
	return nil
}

// Add moves a process, with all its threads, into the groups.
func (g Groups) Add(pid int) error {
	for _, group := range g {
		if err := write(filepath.Join(group.Path, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
			return err
		}
	}
	return nil
}

// Find returns every folder of that id in every tree, whoever made it: also what a killed run left.
func Find(id string) ([]string, error) {
	trees, err := Current()
	if err != nil {
		return nil, err
	}
	var found []string
	for _, t := range trees {
		err := filepath.WalkDir(t.Mount, func(path string, d fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist): // removed while we walk
				return nil
			case err != nil:
				return err
			case !d.IsDir():
				return nil
			case d.Name() == id:
				found = append(found, path)
				return fs.SkipDir
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("look for control groups of %s: %w", id, err)
		}
	}
	return found, nil
}

// Processes returns the ids of the processes in dir and below, in no order, each once.
func Processes(dir string) ([]int, error) {
	var pids []int
	err := walk(dir, func(path string) error {
		b, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if err != nil && !gone(err) && !errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("list the processes of a control group: %w", err)
		}
		for _, f := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil && !slices.Contains(pids, pid) {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids, err
}

// Remove kills what is left in the folders and removes them, deepest first, until all are gone or the limit is reached.
func Remove(ctx context.Context, id string, limit time.Duration) error {
	return poll.Until(ctx, limit, "control groups of "+id+" to be empty", func(context.Context) error {
		dirs, err := Find(id)
		if err != nil {
			return err
		}
		var left error
		for _, dir := range dirs {
			pids, err := Processes(dir)
			if err != nil {
				return err
			}
			for _, pid := range pids {
				if pid > 0 && pid != os.Getpid() {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
			}
			left = errors.Join(left, removeTree(dir))
		}
		return left
	})
}

func removeTree(dir string) error {
	var dirs []string
	if err := walk(dir, func(path string) error { dirs = append(dirs, path); return nil }); err != nil {
		return err
	}
	var left error
	for _, d := range slices.Backward(dirs) {
		if err := unix.Rmdir(d); err != nil && !gone(err) {
			left = errors.Join(left, fmt.Errorf("remove control group %s: %w", d, err))
		}
	}
	return left
}

// walk calls f for dir and every folder below, parents first.
func walk(dir string, f func(string) error) error {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil && gone(err):
			return nil
		case err != nil:
			return err
		case !d.IsDir():
			return nil
		}
		return f(path)
	})
	if err != nil {
		return fmt.Errorf("walk control group %s: %w", dir, err)
	}
	return nil
}

// gone: reading a removed control group gives ENODEV.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}
