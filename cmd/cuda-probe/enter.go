// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
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

// replaceNodes makes a /dev with links to all that is in another one, and an empty /dev/shm. In a user namespace no node can
// be made.
func replaceNodes(from string) error {
	nodes, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	if err := unix.Mount(name, "/dev", "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=755"); err != nil {
		return fmt.Errorf("mount a tmpfs on /dev: %w", err)
	}
	err = errors.Join(os.Mkdir("/dev/shm", 0o755), os.Chmod("/dev/shm", 0o777|os.ModeSticky)) // past the umask
	for _, node := range nodes {
		if node.Name() != "shm" {
			err = errors.Join(err, os.Symlink(filepath.Join(from, node.Name()), filepath.Join("/dev", node.Name())))
		}
	}
	return err
}
