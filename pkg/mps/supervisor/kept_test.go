// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// keep opens a session's /dev/shm and a file in it that is unlinked then, as who has passed on descriptors.
func keep(t *testing.T, status mps.Status, bytes int) (folder, file *os.File) {
	t.Helper()
	folder, err := os.Open(status.ShmDir)
	must.Do(t, err)
	if file, err = os.Create(filepath.Join(status.ShmDir, "kept")); err == nil {
		_, err = file.Write(make([]byte, bytes))
	}
	must.Do(t, errors.Join(err, os.Remove(file.Name())))
	t.Cleanup(func() { _, _ = folder.Close(), file.Close() })
	return folder, file
}

// TestKeptMemory: what ended clients keep of the memory of a device's sessions is bounded for the device: it is taken from what the
// next session has. They have no part in that.
func TestKeptMemory(t *testing.T) {
	w, s := supervised(t)
	devices := map[uint64]bool{}
	var all []*os.File
	for range 3 {
		status := must.Get(s.Ensure(t.Context(), one))(t)
		folder, file := keep(t, status, mebibyte)
		all = append(all, folder, file)
		var is unix.Stat_t
		must.Do(t, errors.Join(s.Stop(t.Context(), one.ID), unix.Fstat(int(file.Fd()), &is)))
		devices[is.Dev] = true
	}
	expect.Equal(t, len(devices), 1, "file systems are kept")
	status := must.Get(s.Ensure(t.Context(), one))(t)
	for i := 0; i < len(all); i += 2 {
		if fd, err := unix.Openat(int(all[i].Fd()), fmt.Sprint("later", i), unix.O_CREAT|unix.O_WRONLY, 0o600); err == nil {
			_ = unix.Close(fd)
			t.Error("who kept the folder of an ended session makes files")
		}
	}
	var used unix.Statfs_t
	if err := unix.Statfs(status.ShmDir, &used); err != nil || int64(used.Blocks-used.Bfree)*used.Bsize < 3*mebibyte {
		t.Errorf("what is kept does not count for the next session: %v", err)
	}
	for _, file := range all {
		_ = file.Close()
	}
	must.Do(t, s.Stop(t.Context(), one.ID))
	w.nothingLeft(one.ID)
}

// TestKeptMemoryAtTheEnd: a supervisor that ends leaves no mount, and programs of running containers their memory.
func TestKeptMemoryAtTheEnd(t *testing.T) {
	w := newWorld(t)
	s := must.Get(New(context.Background(), w.options))(t)
	status := must.Get(s.Ensure(t.Context(), one))(t)
	keep(t, status, mebibyte)
	must.Do(t, s.Stop(t.Context(), one.ID))
	second := mps.Spec{ID: "gpu-1", Devices: []string{gpuB}}
	status = must.Get(s.Ensure(t.Context(), second))(t)
	mapped := must.Get(os.Create(filepath.Join(status.ShmDir, "mapped")))(t)
	defer func() { _ = mapped.Close() }()
	must.Do(t, errors.Join(mapped.Truncate(mebibyte), s.Close(context.Background())))
	if info, err := mapped.Stat(); err != nil || info.Size() != mebibyte {
		t.Errorf("a file of a running container was cut to %d bytes: %v", info.Size(), err)
	}
	w.nothingLeft("")
}

// TestModeOfSharedMemory: a client that was root and has taken the /dev/shm for itself keeps others out for a moment only.
func TestModeOfSharedMemory(t *testing.T) {
	_, _, status := started(t, func(o *Options) { o.LeftoverInterval = 50 * time.Millisecond })
	must.Do(t, errors.Join(os.Chown(status.ShmDir, 1000, 1000), os.Chmod(status.ShmDir, 0o700)))
	eventually(t, "the mode to be restored", func() bool {
		var is unix.Stat_t
		return unix.Stat(status.ShmDir, &is) == nil && is.Mode&0o7777 == 0o1777 && is.Uid == 0
	})
}

// TestCanceledEnd: that somebody gives up a Stop does not mean that memory is kept.
func TestCanceledEnd(t *testing.T) {
	w := newWorld(t)
	f := w.folder(one.ID)
	must.Do(t, errors.Join(f.make(), f.mount(mebibyte, "")))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if kept, err := f.memory().empty(ctx, time.Minute); kept || err == nil {
		t.Errorf("got %v, %v", kept, err)
	}
	expect.Do(t, f.remove(t.Context(), time.Minute))
	w.nothingLeft(one.ID)
}

// proc makes a procfs of a node with this many GPUs.
func proc(t *testing.T, gpus int) string {
	t.Helper()
	proc := t.TempDir()
	for i := range gpus {
		must.Do(t, os.MkdirAll(filepath.Join(proc, fmt.Sprintf("driver/nvidia/gpus/0000:%02x:00.0", i+1)), 0o755))
	}
	return proc
}

// size returns the size of the file system at a path.
func size(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Statfs_t
	must.Do(t, unix.Statfs(path, &st))
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
	w, s := supervised(t)
	s.node.proc, s.node.tmpfs = proc(t, 2), 1024*mebibyte
	status := must.Get(s.Ensure(t.Context(), mps.Spec{ID: "a", Devices: []string{gpuA}}))(t)
	log := string(w.folder("a").logs())
	sum := int64(0)
	for path, want := range map[string]int64{status.PipeDir: pipeSize, log: logSize, status.ShmDir: 464 * mebibyte} {
		var st unix.Statfs_t
		must.Do(t, unix.Statfs(path, &st))
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
