// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cgroup gives tests cgroups of version 2, also on machines whose controllers are in hierarchies of version 1: limits
// of the simulated driver need none. Those of pods are in whatever hierarchy the machine has.
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
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// Mount mounts the hierarchy of version 2 until the test ends, and returns where.
func Mount(t testing.TB) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("/tmp", "cgroup2"))(t) // t.TempDir is removed while it is mounted
	t.Cleanup(func() { _ = os.Remove(dir) })
	MountAt(t, dir)
	return dir
}

// MountAt mounts it in a folder, which is made if it is not there.
func MountAt(t testing.TB, dir string) {
	t.Helper()
	must.Do(t, os.MkdirAll(dir, 0o755))
	err := syscall.Mount("none", dir, "cgroup2", 0, "")
	if errors.Is(err, syscall.EPERM) {
		t.Skip("mounting cgroups needs CAP_SYS_ADMIN: run the tests as root")
	}
	must.Do(t, err, "mount cgroups of version 2")
	t.Cleanup(func() {
		expect.Do(t, syscall.Unmount(dir, syscall.MNT_DETACH), "unmount cgroups")
	})
}

// Make makes a cgroup of this test, which is removed at its end.
func Make(t testing.TB, tree, name string) string {
	t.Helper()
	dir := filepath.Join(tree, strings.ReplaceAll(fmt.Sprintf("partage-%d-%s-%s", os.Getpid(), t.Name(), name), "/", "-"))
	must.Do(t, os.Mkdir(dir, 0o755))
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
	must.Do(t, err)
	for pid := range strings.FieldsSeq(string(procs)) {
		_ = os.WriteFile(filepath.Join(filepath.Dir(dir), "cgroup.procs"), []byte(pid), 0) // it may have ended
	}
	must.Do(t, os.Remove(dir))
}

// InPod moves a process into the cgroup of a pod with a UID, or of any pod without one, on this machine until the test ends.
func InPod(t testing.TB, pid int, uid string) {
	t.Helper()
	pattern, id := "kubepods-*", []byte(strconv.Itoa(pid))
	if uid != "" {
		pattern += "-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice"
	}
	var errs []error
	// One hierarchy is enough. With version 2 there is only one.
	for _, at := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/freezer"} {
		if _, err := os.Stat(filepath.Join(at, "cgroup.procs")); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(at, pattern)
		if err == nil {
			t.Cleanup(func() {
				_ = os.WriteFile(filepath.Join(at, "cgroup.procs"), id, 0) // it may have ended
				// What was killed leaves the cgroup a little later.
				for end := time.Now().Add(time.Minute); os.Remove(dir) != nil; time.Sleep(5 * time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("cgroup %s does not get empty", dir)
					}
				}
			})
			err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), id, 0)
		}
		if err == nil {
			return
		}
		errs = append(errs, err)
	}
	t.Skipf("no cgroup can be made here: %v", errors.Join(errs...))
}
