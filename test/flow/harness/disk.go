// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/must"
)

// DataDir is the folder in which the driver keeps what has to outlive it.
func (n *Files) DataDir() string { return filepath.Join(n.PluginsDir, DriverName) }

// RecordsOf are the files in the driver's folder that mention a claim, in their names or in what they say: whatever the
// driver knows of the claim when it starts again. It fails if there is none.
func (n *Files) RecordsOf(t testing.TB, uid string) []string {
	t.Helper()
	var paths []string
	err := filepath.WalkDir(n.DataDir(), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if err == nil && (strings.Contains(entry.Name(), uid) || bytes.Contains(data, []byte(uid))) {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil || len(paths) == 0 {
		t.Fatalf("records of claim %s: %v, %v", uid, paths, err)
	}
	return paths
}

// Ways in which a file gets lost.
var (
	// Unreadable makes a file one whose reading gives EIO, as on a bad disk.
	Unreadable = func(path string) error {
		err := errors.Join(os.Remove(path), os.Symlink("/proc/self/mem", path))
		if _, readErr := os.ReadFile(path); !errors.Is(readErr, unix.EIO) {
			err = errors.Join(err, errors.New("it can be read"), readErr)
		}
		return err
	}
	// CutOff leaves the first letter of a file, as a disk does that loses what was written last.
	CutOff = func(path string) error { return os.Truncate(path, 1) }
	// IsFolder puts a folder in the place of a file, as a bad repair of a file system does.
	IsFolder = func(path string) error {
		return errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "lost+found"), 0o755))
	}
)

// DamageRecords damages all that the driver has written down about a claim.
func (n *Files) DamageRecords(t testing.TB, uid string, damage func(path string) error) {
	t.Helper()
	for _, path := range n.RecordsOf(t, uid) {
		must.Do(t, damage(path), "damage", path)
	}
}

// ReadOnly makes a folder one that nobody can write to until the test ends, as the kernel does after an error of the disk.
func ReadOnly(t testing.TB, dir string) {
	t.Helper()
	SkipWithoutMounts(t)
	must.Do(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""), "bind", dir)
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	must.Do(t, unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""), "make", dir, "read-only")
}

// SmallDisk gives the driver a disk of its own, in memory, and returns what fills it up. It is for a driver that was not
// started yet.
func (n *Files) SmallDisk(t testing.TB) (fill func()) {
	t.Helper()
	SkipWithoutMounts(t)
	dir := n.DataDir()
	if err := errors.Join(os.MkdirAll(dir, 0o755), unix.Mount("tmpfs", dir, "tmpfs", 0, "size=32m")); err != nil {
		t.Fatalf("mount a small disk at %s: %v", dir, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return func() {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "full"), make([]byte, 33<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("the disk does not get full: %v", err)
		}
	}
}
