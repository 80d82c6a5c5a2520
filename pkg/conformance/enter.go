// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps/supervisor"
	"github.com/partage-dev/partage/pkg/node/process"
)

const (
	// entered is set in the environment of the process that Enter has made of this one.
	entered = "PARTAGE_CONFORMANCE_ENTERED"
	// workSize bounds what MPS may write, in bytes.
	workSize = 1 << 30
	self     = "/proc/self/exe"
)

// LaunchCommand is the sub-command by which the part mps runs this program again to call Launch
// with the other arguments. A program that runs the part mps must have it.
const LaunchCommand = supervisor.LaunchCommand

// Launch replaces this process by a program of MPS, as the MPS supervisor starts it.
func Launch(args []string) error { return supervisor.Launch(args) }

// Alone makes this the only run on the node that does more than read: two would end each
// other's MPS and undo each other's changes. It ends with the process, or with release.
func Alone(dataDir string) (release func(), err error) {
	path := filepath.Join(dataDir, "conformance", "lock")
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, fmt.Errorf("keep other runs away: %w", err)
	}
	file := flock.New(path)
	alone, err := file.TryLock()
	if err != nil {
		return nil, fmt.Errorf("keep other runs away: %w", err)
	}
	if !alone {
		return nil, fmt.Errorf("another run with --mps or --intrusive is under way on this node: it has locked %s", path)
	}
	return func() { _ = file.Unlock() }, nil // the process ends soon
}

// Enter makes a place for the files of MPS that is gone with this process, however it ends: a
// tmpfs at a folder in workDir, in a mount namespace of its own. A mount namespace belongs to a
// thread, so the process runs itself again. Where the folder cannot be made, because the root
// of a container is read-only, what workDir is in is hidden by the tmpfs.
func Enter(workDir string) error {
	if os.Getenv(entered) != "" {
		return nil
	}
	folder := daemonFolder(workDir)
	at := filepath.Dir(folder)
	if err := os.MkdirAll(at, 0o755); errors.Is(err, unix.EROFS) {
		at = filepath.Dir(workDir)
	} else if err != nil {
		return fmt.Errorf("make a folder for MPS: %w", err)
	}
	runtime.LockOSThread()
	if err := process.OwnMounts(); err != nil {
		return err
	}
	if err := unix.Mount("partage-conformance", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("mode=755,size=%d", workSize)); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", at, err)
	}
	if err := os.MkdirAll(filepath.Dir(folder), 0o755); err != nil {
		return fmt.Errorf("make a folder for MPS: %w", err)
	}
	return fmt.Errorf("run %s again: %w", self, unix.Exec(self, os.Args, append(os.Environ(), entered+"=yes")))
}

// daemonFolder is where the files of MPS are in the folder of the options: below the tmpfs, since
// it is removed between two daemons, and with a short name, since paths of sockets have at most
// 107 bytes.
func daemonFolder(workDir string) string { return filepath.Join(workDir, "mps", "d") }
