// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// charged returns what a cgroup, with those below it, has of the memory.
func (x *tenants) charged(cgroup string) int64 {
	x.Helper()
	data, err := os.ReadFile(filepath.Join(cgroup, "memory.current"))
	if errors.Is(err, os.ErrNotExist) {
		data, err = os.ReadFile(filepath.Join(cgroup, "memory.usage_in_bytes"))
	}
	number, numberErr := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	if err := errors.Join(err, numberErr); err != nil {
		x.Fatal(err)
	}
	return number
}

// docs/concepts/mps.md says to whom the kernel charges what is in a /dev/shm.
func TestWhoIsChargedForMemory(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=512m")
	path := filepath.Join(folder, "file")

	// Who writes it, and nobody who reads it.
	end := x.container(1, "fill="+path)
	endReader := x.container(2, "read="+path)
	if writer, reader := x.charged(x.pod(1)), x.charged(x.pod(2)); writer < filled || reader > filled/2 {
		t.Errorf("the writer is charged %d MiB, the reader %d, for %d", writer/mebibyte, reader/mebibyte, filled/mebibyte)
	}

	// After its end the cgroup above, for as long as the file is there.
	endReader()
	end()
	if _, err := os.Stat(x.pod(1)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pod is still there: %v", err)
	}
	if after := x.charged(x.cgroup); after < filled {
		t.Errorf("after the end of the pod, what is above it is charged %d MiB", after/mebibyte)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the memory to be free", func() bool { return x.charged(x.cgroup) < filled/2 })
}

// A pod's memory limit holds for what it writes to a /dev/shm.
func TestMemoryLimitOfWriter(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=512m")
	limit := "memory.max"
	if _, err := os.Stat(filepath.Join(x.cgroup, limit)); err != nil {
		limit = "memory.limit_in_bytes"
	}
	path := filepath.Join(folder, "file")
	end, done := x.start(1, "limit="+limit, "fill="+path)
	end()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); done || err != nil || st.Blocks*512 > filled/2 {
		t.Errorf("done: %t, the file has %d MiB, limit %d, %v", done, st.Blocks*512/mebibyte, filled/2/mebibyte, err)
	}
	// Not for what it finds there.
	x.container(2, "fill="+filepath.Join(folder, "other"))
	x.container(3, "limit="+limit, "map="+filepath.Join(folder, "other"))
}
