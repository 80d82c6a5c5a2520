// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/cuda/probe"
)

// entered is set in the environment of the program that enter has run.
const entered = "PARTAGE_CUDA_PROBE_ENTERED"

// enter gives the program the file system that its options ask for. A mount namespace
// belongs to a thread, and this program has several, so it runs itself again from the
// one that has it.
func enter(o probe.Options) error {
	all := binds(o)
	if len(all) == 0 || os.Getenv(entered) != "" {
		return nil
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("separate the mount namespace: %w", err)
	}
	self, err := os.Open("/proc/self/exe") // it may be in a folder that is going to be hidden
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	for _, b := range all {
		if err := unix.Mount(b.From, b.To, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s to %s: %w", b.From, b.To, err)
		}
	}
	return fmt.Errorf("run %s again: %w", name, unix.Exec(fmt.Sprintf("/proc/self/fd/%d", self.Fd()), os.Args, append(os.Environ(), entered+"=1")))
}

// binds are in the order in which they must be made.
func binds(o probe.Options) []probe.Bind {
	var all []probe.Bind
	if o.DevRoot != "" {
		all = append(all, probe.Bind{From: filepath.Join(o.DevRoot, "dev"), To: "/dev"})
	}
	if o.SharedMemory != "" {
		all = append(all, probe.Bind{From: o.SharedMemory, To: "/dev/shm"})
	}
	return append(all, o.Binds...)
}
