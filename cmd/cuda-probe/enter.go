// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/conformance/probe"
	"github.com/partage-dev/partage/pkg/node/process"
)

// enter gives the program the file system and the user that its options ask for. A mount
// namespace belongs to a thread: the main one, which does all that CUDA does, and to the
// threads that CUDA starts from it.
func enter(o probe.Options) error {
	if err := mountAll(o); err != nil {
		return err
	}
	if o.User == 0 {
		return nil
	}
	for _, err := range []error{syscall.Setgroups(nil), syscall.Setgid(o.User), syscall.Setuid(o.User)} {
		if err != nil {
			return fmt.Errorf("become user %d: %w", o.User, err)
		}
	}
	// Another user's process is not ended with its parent any more (prctl(2)).
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("end with the program that has started this one: %w", err)
	}
	return nil
}

// lost reports whether this program has a PID namespace of its own without the /proc of it. CUDA finds its process there: on
// an H100 with driver 580, cuInit fails without with CUDA_ERROR_OPERATING_SYSTEM.
func lost() bool {
	self, err := os.Readlink("/proc/self")
	return err == nil && self != strconv.Itoa(os.Getpid())
}

// mountAll makes a mount namespace with what the options ask for, if they do.
func mountAll(o probe.Options) error {
	lost := lost()
	if !lost && o.DevRoot == "" && o.SharedMemory == "" {
		return nil
	}
	if err := process.OwnMounts(); err != nil {
		return err
	}
	if lost {
		if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return fmt.Errorf("mount a /proc: %w", err)
		}
	}
	if o.DevRoot != "" {
		if err := replaceNodes(filepath.Join(o.DevRoot, "dev")); err != nil {
			return err
		}
	}
	if o.SharedMemory != "" {
		if err := unix.Mount(o.SharedMemory, "/dev/shm", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s to /dev/shm: %w", o.SharedMemory, err)
		}
	}
	return nil
}

// plain are the nodes that programs need besides NVIDIA's.
var plain = []string{"null", "zero", "full", "random", "urandom"}

// replaceNodes makes a /dev with the NVIDIA nodes of another one. In a user namespace no
// node can be made, so they are bound.
func replaceNodes(from string) error {
	paths := map[string]string{} // by where they go
	for _, node := range plain {
		paths[node] = filepath.Join("/dev", node)
	}
	for _, pattern := range []string{"nvidia*", "nvidia-caps/*"} {
		found, err := filepath.Glob(filepath.Join(from, pattern))
		if err != nil {
			return err
		}
		for _, path := range found {
			if info, err := os.Stat(path); err == nil && info.Mode()&os.ModeCharDevice != 0 {
				paths[strings.TrimPrefix(path, from)] = path
			}
		}
	}
	nodes := map[string]*os.File{} // open, since /dev is going to be hidden
	for to, path := range paths {
		node, err := os.OpenFile(path, unix.O_PATH, 0)
		if err != nil {
			return err
		}
		nodes[to] = node
	}
	if err := unix.Mount(name, "/dev", "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=755"); err != nil {
		return fmt.Errorf("mount a tmpfs on /dev: %w", err)
	}
	for _, folder := range []string{"/dev/shm", "/dev/nvidia-caps"} {
		if err := os.Mkdir(folder, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", folder, err)
		}
	}
	for path, node := range nodes {
		if err := bindNode(node, filepath.Join("/dev", path)); err != nil {
			return err
		}
	}
	return os.Chmod("/dev/shm", 0o777|os.ModeSticky)
}

// bindNode makes a file for the node to be bound to.
func bindNode(node *os.File, to string) error {
	file, err := os.OpenFile(to, os.O_CREATE, 0o644)
	if err == nil {
		err = file.Close()
	}
	if err == nil {
		err = unix.Mount(fmt.Sprintf("/proc/self/fd/%d", node.Fd()), to, "", unix.MS_BIND, "")
	}
	if err != nil {
		return fmt.Errorf("bind a node to %s: %w", to, err)
	}
	return nil
}
