// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
)

// node gives the world a proc root of a node with this memory and these GPUs.
func (w *world) node(memory int64, gpus int) {
	w.Helper()
	proc := filepath.Join(w.dir+".proc", "proc")
	write := func(path, text string) {
		path = filepath.Join(proc, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			w.Fatal(err)
		}
	}
	write("meminfo", fmt.Sprintf("MemTotal:       %d kB\nMemFree:  12 kB\n", memory>>10))
	write("sys/kernel/random/boot_id", "6f1c9c0e-0000-4000-8000-000000000001\n")
	for i := range gpus {
		write(fmt.Sprintf("driver/nvidia/gpus/0000:%02x:00.0/information", i+1), "Model: H100\n")
	}
	w.options.Roots.Proc = proc
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
		gpus, percent := i/2, 25<<(i%2)
		w := &world{T: t, dir: filepath.Join(t.TempDir(), "d")}
		w.node(64<<30, gpus)
		m := &memory{proc: w.options.Roots.Proc, percent: percent}
		limit, err := m.limit()
		if err != nil || limit != int64(percent)<<30*64/100 {
			t.Fatalf("limit %d with %d percent, %v", limit, percent, err)
		}
		session := func(devices ...string) int64 {
			return cost(m.shmSize(mps.Spec{Devices: devices}, limit)) + fixedCost()
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
	w.node(2048*mebibyte, 2)
	s := w.supervisor()
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
		if got := int64(st.Blocks) * st.Bsize; got != want || int64(st.Files) != maxFiles(want) {
			t.Errorf("%s has %d KiB and %d files, want %d and %d", path, got>>10, st.Files, want>>10, maxFiles(want))
		}
		if want := int64(unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC | noSymlinks); st.Flags&want != want {
			t.Errorf("%s has the flags %x, want %x", path, st.Flags, want)
		}
		sum += cost(want)
	}
	if sum > 512*mebibyte {
		t.Errorf("all together may take %d MiB", sum/mebibyte)
	}
}

// A session whose tmpfs does not fit beside the others is refused, and says so.
func TestMemoryIsTaken(t *testing.T) {
	w := newWorld(t)
	w.node(512*mebibyte, 1)
	s := w.supervisor()
	first, err := s.Ensure(t.Context(), mps.Spec{ID: "a", Devices: []string{gpuA}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Ensure(t.Context(), mps.Spec{ID: "b", Devices: []string{gpuB}})
	for _, want := range []string{"session b", "256 MiB", "may have " + strconv.Itoa(512/2) + " MiB, which is 50 % of the node's memory"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	w.nothingLeft("b")
	if got := statusOf(t, s, "a"); got.Phase != mps.Running || got.Servers[0] != first.Servers[0] {
		t.Errorf("got %v", got)
	}
	// There is room again.
	if err := s.Stop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Ensure(t.Context(), mps.Spec{ID: "b", Devices: []string{gpuB}}); err != nil {
		t.Error(err)
	}
}
