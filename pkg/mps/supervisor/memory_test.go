// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
)

// proc makes a procfs of a node with this many GPUs.
func proc(t *testing.T, gpus int) string {
	t.Helper()
	proc := t.TempDir()
	for i := range gpus {
		if err := os.MkdirAll(filepath.Join(proc, fmt.Sprintf("driver/nvidia/gpus/0000:%02x:00.0", i+1)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return proc
}

// size returns the size of the file system at a path.
func size(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks) * st.Bsize
}

// What containers write to the tmpfs of all sessions is the node's memory.
func TestMemoryOfAllSessions(t *testing.T) {
	const partition = "MIG-11111111-2222-3333-4444-555555555555"
	for i := range 2 * 17 {
		gpus, limit := i/2, int64(16<<30)<<(i%2)
		proc := proc(t, gpus)
		session := func(devices ...string) int64 {
			return host.TmpfsCost(shmSize(mps.Spec{Devices: devices}, limit, proc)) + fixedCost()
		}
		for name, sum := range map[string]int64{
			"whole GPUs":          int64(gpus) * session(gpuA),
			"partitions":          int64(gpus) * maxPartitions * session(partition),
			"one on several GPUs": session(make([]string, max(1, gpus))...),
		} {
			if sum > limit || gpus > 0 && sum < limit*9/10 {
				t.Errorf("%d GPUs: sessions of %s can take %d MiB, want not much less than %d", gpus, name, sum/mebibyte, limit/mebibyte)
			}
		}
	}
}

// noSymlinks is ST_NOSYMFOLLOW.
const noSymlinks = 0x2000

// A tmpfs has the size that was computed for it, a bound for files, and nothing in it can
// be run or leads elsewhere.
func TestMemoryOfSession(t *testing.T) {
	w := newWorld(t)
	s := w.supervisor()
	s.node.proc, s.node.tmpfs = proc(t, 2), 1024*mebibyte
	status, err := s.Ensure(t.Context(), mps.Spec{ID: "a", Devices: []string{gpuA}})
	if err != nil {
		t.Fatal(err)
	}
	log := string(w.folder("a").logs())
	sum := int64(0)
	for path, want := range map[string]int64{status.PipeDir: pipeSize, log: logSize, status.ShmDir: 464 * mebibyte} {
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err != nil {
			t.Fatal(err)
		}
		if got := int64(st.Blocks) * st.Bsize; got != want || int64(st.Files) != host.TmpfsFiles(want) {
			t.Errorf("%s has %d KiB and %d files, want %d and %d", path, got>>10, st.Files, want>>10, host.TmpfsFiles(want))
		}
		if want := int64(unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC | noSymlinks); st.Flags&want != want {
			t.Errorf("%s has the flags %x, want %x", path, st.Flags, want)
		}
		sum += host.TmpfsCost(want)
	}
	if sum > 512*mebibyte {
		t.Errorf("all together may take %d MiB", sum/mebibyte)
	}
}
