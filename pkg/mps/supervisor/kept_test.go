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
)

// keep opens a session's /dev/shm and a file in it that is unlinked then, as who has passed on descriptors.
func keep(t *testing.T, status mps.Status, bytes int) (folder, file *os.File) {
	t.Helper()
	folder, err := os.Open(status.ShmDir)
	if err != nil {
		t.Fatal(err)
	}
	if file, err = os.Create(filepath.Join(status.ShmDir, "kept")); err == nil {
		_, err = file.Write(make([]byte, bytes))
	}
	if err = errors.Join(err, os.Remove(file.Name())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = folder.Close(), file.Close() })
	return folder, file
}

// TestKeptMemory: what ended clients keep of the memory of a device's sessions is bounded for the device: it is taken from what the
// next session has. They have no part in that.
func TestKeptMemory(t *testing.T) {
	w := newWorld(t)
	s := w.supervisor()
	devices := map[uint64]bool{}
	var all []*os.File
	for range 3 {
		status, err := s.Ensure(t.Context(), one)
		if err != nil {
			t.Fatal(err)
		}
		folder, file := keep(t, status, mebibyte)
		all = append(all, folder, file)
		var is unix.Stat_t
		if err := errors.Join(s.Stop(t.Context(), one.ID), unix.Fstat(int(file.Fd()), &is)); err != nil {
			t.Fatal(err)
		}
		devices[is.Dev] = true
	}
	if len(devices) != 1 {
		t.Errorf("%d file systems are kept", len(devices))
	}
	status, err := s.Ensure(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
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
	if err := s.Stop(t.Context(), one.ID); err != nil {
		t.Fatal(err)
	}
	w.nothingLeft(one.ID)
}

// TestKeptMemoryAtTheEnd: a supervisor that ends leaves no mount, and programs of running containers their memory.
func TestKeptMemoryAtTheEnd(t *testing.T) {
	w := newWorld(t)
	s, err := New(context.Background(), w.options)
	if err != nil {
		t.Fatal(err)
	}
	status, err := s.Ensure(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
	keep(t, status, mebibyte)
	if err := s.Stop(t.Context(), one.ID); err != nil {
		t.Fatal(err)
	}
	second := mps.Spec{ID: "gpu-1", Devices: []string{gpuB}}
	if status, err = s.Ensure(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	mapped, err := os.Create(filepath.Join(status.ShmDir, "mapped"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mapped.Close() }()
	if err := errors.Join(mapped.Truncate(mebibyte), s.Close(context.Background())); err != nil {
		t.Fatal(err)
	}
	if info, err := mapped.Stat(); err != nil || info.Size() != mebibyte {
		t.Errorf("a file of a running container was cut to %d bytes: %v", info.Size(), err)
	}
	w.nothingLeft("")
}

// TestModeOfSharedMemory: a client that was root and has taken the /dev/shm for itself keeps others out for a moment only.
func TestModeOfSharedMemory(t *testing.T) {
	w := newWorld(t)
	w.options.LeftoverInterval = 50 * time.Millisecond
	s := w.supervisor()
	status, err := s.Ensure(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chown(status.ShmDir, 1000, 1000), os.Chmod(status.ShmDir, 0o700)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the mode to be restored", func() bool {
		var is unix.Stat_t
		return unix.Stat(status.ShmDir, &is) == nil && is.Mode&0o7777 == 0o1777 && is.Uid == 0
	})
}

// TestCanceledEnd: that somebody gives up a Stop does not mean that memory is kept.
func TestCanceledEnd(t *testing.T) {
	w := newWorld(t)
	f := w.folder(one.ID)
	if err := errors.Join(f.make(), f.mount(mebibyte, "")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if kept, err := f.memory().empty(ctx, time.Minute); kept || err == nil {
		t.Errorf("got %v, %v", kept, err)
	}
	if err := f.remove(t.Context(), time.Minute); err != nil {
		t.Error(err)
	}
	w.nothingLeft(one.ID)
}
