// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// disks are file systems on which the lock file cannot be made.
var disks = map[string]func(t *testing.T, dir string){
	"full": func(t *testing.T, dir string) {
		t.Helper()
		// Its only inode is that of the folder.
		mount(t, dir, 0, "size=4k,nr_inodes=1")
	},
	"read-only": func(t *testing.T, dir string) {
		t.Helper()
		mount(t, dir, unix.MS_RDONLY, "")
	},
}

func mount(t *testing.T, dir string, flags uintptr, options string) {
	t.Helper()
	if err := unix.Mount("disk", dir, "tmpfs", flags, options); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

// TestLockFileCannotBeMade: without the file nobody knows of other instances. The devices
// are published nevertheless, and the plugin is ready.
func TestLockFileCannotBeMade(t *testing.T) {
	for name, disk := range disks {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				dir := t.TempDir()
				disk(t, dir)
				c.lockFile = filepath.Join(dir, "publish.lock")
				inventory := inventoryOf(t, withoutShares(), firstGPU)
				r := c.start(t, "one", inventory)
				c.converges(t, inventory, AllFeatures, time.Minute)
				for range 3 {
					r.publisher.SetInventory(lost(inventory, firstGPU))
					c.converges(t, lost(inventory, firstGPU), AllFeatures, time.Minute)
					r.publisher.SetInventory(inventory)
					c.converges(t, inventory, AllFeatures, time.Minute)
				}
				after(time.Minute)
				r.ready(t)
			})
		})
	}
}
