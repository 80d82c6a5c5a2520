// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cgroup gives tests cgroups of version 2, also on machines whose controllers are in hierarchies of version 1: limits
// of the simulated driver need none.
package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// Mount mounts the hierarchy of version 2 until the test ends, and returns where.
func Mount(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "cgroup2") // t.TempDir is removed while it is mounted
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) })
	MountAt(t, dir)
	return dir
}

// MountAt mounts it in a folder, which is made if it is not there.
func MountAt(t testing.TB, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	err := syscall.Mount("none", dir, "cgroup2", 0, "")
	if errors.Is(err, syscall.EPERM) {
		t.Skip("mounting cgroups needs CAP_SYS_ADMIN: run the tests as root")
	}
	if err != nil {
		t.Fatalf("mount cgroups of version 2: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount cgroups: %v", err)
		}
	})
}

// Make makes a cgroup of this test, which is removed at its end.
func Make(t testing.TB, tree, name string) string {
	t.Helper()
	dir := filepath.Join(tree, strings.ReplaceAll(fmt.Sprintf("partage-%d-%s-%s", os.Getpid(), t.Name(), name), "/", "-"))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Remove(t, dir) })
	return dir
}

// Enter moves a process into a cgroup.
func Enter(t testing.TB, dir string, pid int) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
		t.Fatalf("move process %d into %s: %v", pid, dir, err)
	}
}

// Remove removes a cgroup, and moves the processes out that it has.
func Remove(t testing.TB, dir string) {
	t.Helper()
	procs, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	for pid := range strings.FieldsSeq(string(procs)) {
		_ = os.WriteFile(filepath.Join(filepath.Dir(dir), "cgroup.procs"), []byte(pid), 0) // it may have ended
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
}
