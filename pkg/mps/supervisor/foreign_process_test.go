// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestForeignProcess: what a client left goes after its end, whatever processes without a claim have open. To read that takes as
// long as they like: each may have a million descriptors, and a line in procfs for each file that one of them watches. Here it
// takes for ever, unless nobody reads it.
func TestForeignProcess(t *testing.T) {
	w := newWorld(t)
	w.options.LeftoverInterval = 50 * time.Millisecond
	proc, descriptors := foreignProcess(t)
	w.options.Roots.Proc = proc
	s := w.supervisor()
	status, err := s.Ensure(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(status.ShmDir, "left")
	write(t, left)

	read := make(chan *os.File)
	go func() {
		file, err := os.OpenFile(descriptors, os.O_WRONLY, 0) // when it is opened to be read
		if err != nil {
			t.Error(err)
		}
		read <- file
	}()
	var opened *os.File
	eventually(t, "what the client left to go", func() bool {
		select {
		case opened = <-read:
		default:
		}
		_, err := os.Lstat(left)
		return opened != nil || errors.Is(err, os.ErrNotExist)
	})
	if opened != nil {
		t.Error("to remove what a client left, the supervisor reads the descriptors of a process that has nothing to do with the session")
	} else {
		reader, err := os.OpenFile(descriptors, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = reader.Close() }()
		opened = <-read
	}
	_ = opened.Close()
}

// foreignProcess returns a procfs that is this node's, with one process more. To read what that has open is to wait until somebody
// writes into a FIFO.
func foreignProcess(t *testing.T) (proc, descriptors string) {
	t.Helper()
	proc = t.TempDir()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		// Of processes that come later nothing is read.
		if err := os.Symlink(filepath.Join("/proc", entry.Name()), filepath.Join(proc, entry.Name())); err != nil {
			t.Fatal(err)
		}
	}
	const unused = 5000000 // above all that the kernel gives to processes
	process := filepath.Join(proc, strconv.Itoa(unused))
	descriptors = filepath.Join(process, "fdinfo", "3")
	err = errors.Join(os.MkdirAll(filepath.Dir(descriptors), 0o755), os.MkdirAll(filepath.Join(process, "ns"), 0o755), unix.Mkfifo(descriptors, 0o600))
	for _, name := range []string{"cgroup", "mountinfo", "maps", "ns/mnt", "cwd"} {
		err = errors.Join(err, os.Symlink(filepath.Join("/proc/self", name), filepath.Join(process, name)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return proc, descriptors
}
