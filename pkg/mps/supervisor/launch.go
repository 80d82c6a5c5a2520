// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/process/keeper"
)

// LaunchCommand is the sub-command by which a supervisor runs its own program again
// to call Launch with the other arguments. A program that uses a Supervisor must
// have it.
const LaunchCommand = "launch"

// self is this program, even if its file was replaced since it started.
const self = "/proc/self/exe"

// launch describes how to run a control daemon for a session.
type launch struct {
	// lock is the file of the keeper, and shm is mounted at /dev/shm.
	lock, shm string
	// root is changed to, unless it is empty; session is then mounted at its /tmp, and dev
	// at its /dev, unless that is empty.
	root, session, dev string
}

// Launch makes this process the keeper of a control daemon that has its own view of the file system, and ends when nothing of
// it is left. It returns only if it fails.
//
// A mount namespace is per thread until the program starts, so this needs a
// process that does nothing else: the supervisor runs its own program for it.
func Launch(args []string) error {
	var l launch
	flags := flag.NewFlagSet(LaunchCommand, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&l.lock, "lock", "", "")
	flags.StringVar(&l.shm, "shm", "", "")
	flags.StringVar(&l.root, "root", "", "")
	flags.StringVar(&l.session, "session", "", "")
	flags.StringVar(&l.dev, "dev", "", "")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("%s: %w", LaunchCommand, err)
	}
	if flags.NArg() == 0 {
		return fmt.Errorf("%s: want a program; only the supervisor uses this", LaunchCommand)
	}
	status, err := keeper.Keep(l.lock, keeper.Program{Path: flags.Arg(0), Args: flags.Args()[1:], Env: os.Environ(), Root: l.root, Prepare: l.mount})
	if err != nil {
		return fmt.Errorf("run %s: %w", flags.Arg(0), err)
	}
	os.Exit(status) // as a program does that has replaced this process
	return nil
}

// arguments returns the arguments of this program that make it run another one:
// the inverse of what Launch parses.
func (l launch) arguments(program string, args ...string) []string {
	all := []string{LaunchCommand, "-lock", l.lock, "-shm", l.shm, "-root", l.root, "-session", l.session, "-dev", l.dev, "--", program}
	return append(all, args...)
}

// mount gives this thread the file systems that the daemon and its servers have.
func (l launch) mount() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// Mounts made here stay here, but what the host unmounts must be unmounted here
	// too: otherwise its file system stays busy for as long as the daemon runs.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("separate the mount namespace: %w", err)
	}
	if l.dev != "" {
		if err := bind(l.dev, filepath.Join("/", l.root, "dev")); err != nil {
			return err
		}
	}
	if err := bind(l.shm, filepath.Join("/", l.root, "dev/shm")); err != nil {
		return err
	}
	if l.root == "" {
		return nil
	}
	return bind(l.session, filepath.Join(l.root, string(folderInRoot)))
}

func bind(from, to string) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s to %s: %w", from, to, err)
	}
	return nil
}
