// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/node/process/keeper"
)

// LaunchCommand is the sub-command by which a supervisor runs its own program again
// to call Launch with the other arguments. A program that uses a Supervisor must
// have it.
const LaunchCommand = "launch"

// self is this program, even if its file was replaced since it started.
const self = "/proc/self/exe"

// launch describes how to run a control daemon for a session. It is the first argument of Launch.
type launch struct {
	// Starter is the supervisor.
	Starter int
	// Lock is the file of the keeper, and Shm is mounted at /dev/shm.
	Lock, Shm string
	// Root is changed to, unless it is empty; Session is then mounted at its /tmp, and Dev
	// at its /dev, unless that is empty.
	Root, Session, Dev string
}

// Launch makes this process the keeper of a control daemon that has its own view of the file system, and ends when nothing of
// it is left. It returns only if it fails.
//
// A mount namespace is per thread until the program starts, so this needs a
// process that does nothing else: the supervisor runs its own program for it.
func Launch(args []string) error {
	var l launch
	if len(args) < 2 || json.Unmarshal([]byte(args[0]), &l) != nil {
		return fmt.Errorf("%s: want how to run a program, and the program; only the supervisor uses this", LaunchCommand)
	}
	program := keeper.Program{Starter: l.Starter, Path: args[1], Args: args[2:], Env: os.Environ(), Root: l.Root, Prepare: l.mount}
	status, err := keeper.Keep(l.Lock, program)
	if err != nil {
		return fmt.Errorf("run %s: %w", args[1], err)
	}
	os.Exit(status) // as a program does that has replaced this process
	return nil
}

// mount gives this thread the file systems that the daemon and its servers have.
func (l launch) mount() error {
	if err := process.OwnMounts(); err != nil {
		return err
	}
	if l.Dev != "" {
		if err := bind(l.Dev, filepath.Join("/", l.Root, "dev")); err != nil {
			return err
		}
	}
	if err := bind(l.Shm, filepath.Join("/", l.Root, "dev/shm")); err != nil {
		return err
	}
	if l.Root == "" {
		return nil
	}
	return bind(l.Session, filepath.Join(l.Root, string(folderInRoot)))
}

func bind(from, to string) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s to %s: %w", from, to, err)
	}
	return nil
}
