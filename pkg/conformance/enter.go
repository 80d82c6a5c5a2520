// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps/supervisor"
)

const (
	// entered is set in the environment of the process that Enter has made of this one.
	entered = "PARTAGE_CONFORMANCE_ENTERED"
	// workSize bounds what MPS may write, in bytes.
	workSize = 1 << 30
	self     = "/proc/self/exe"
)

// LaunchCommand is the sub-command by which part B runs this program again to call Launch
// with the other arguments. A program that runs part B must have it.
const LaunchCommand = supervisor.LaunchCommand

// Launch replaces this process by a program of MPS, as the MPS supervisor starts it.
func Launch(args []string) error { return supervisor.Launch(args) }

// Enter makes a place for the files of MPS that is gone with this process, however it ends: a
// tmpfs at the folder, in a mount namespace of its own. A mount namespace belongs to a
// thread, so the process runs itself again. Where the folder cannot be made, because the
// root of a container is read-only, the one that it is in is hidden by the tmpfs.
func Enter(folder string) error {
	if os.Getenv(entered) != "" {
		return nil
	}
	at := folder
	if err := os.MkdirAll(folder, 0o755); errors.Is(err, unix.EROFS) {
		at = filepath.Dir(folder)
	} else if err != nil {
		return fmt.Errorf("make a folder for MPS: %w", err)
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace, for which root is needed: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("separate the mount namespace: %w", err)
	}
	if err := unix.Mount("partage-conformance", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("mode=755,size=%d", workSize)); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", at, err)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return fmt.Errorf("make a folder for MPS: %w", err)
	}
	return fmt.Errorf("run %s again: %w", self, unix.Exec(self, os.Args, append(os.Environ(), entered+"=1")))
}
