// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// OwnMounts gives the thread of this goroutine, which must be locked to it, a mount namespace of its own.
func OwnMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace, for which root is needed: %w", err)
	}
	// Mounts made here stay here, but what the host unmounts must be unmounted here
	// too: otherwise its file system stays busy for as long as the process runs.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("separate the mount namespace: %w", err)
	}
	return nil
}
