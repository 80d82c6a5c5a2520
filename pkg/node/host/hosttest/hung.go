// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package hosttest makes what a node does to programs when something on it is broken.
package hosttest

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// HungFolder mounts a file system that never answers, such as that of a server in the
// network that has been stopped, and opens its root in this process. A program that looks
// at the folder or at the open file waits until the test ends.
func HungFolder(t *testing.T) string {
	t.Helper()
	device, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no FUSE: %v", err)
	}
	folder := t.TempDir()
	if err := unix.Mount("test", folder, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", device)); err != nil {
		_ = unix.Close(device)
		t.Skipf("no FUSE: %v", err)
	}
	file, err := unix.Open(folder, unix.O_PATH|unix.O_CLOEXEC, 0)
	t.Cleanup(func() {
		// Ends all who wait.
		_ = unix.Close(device)
		if err == nil {
			_ = unix.Close(file)
		}
		_ = unix.Unmount(folder, unix.MNT_DETACH)
	})
	if err != nil {
		t.Fatal(err)
	}
	return folder
}
