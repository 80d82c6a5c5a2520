// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host/hosttest"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// memoryFolder is a /dev/shm for tests.
func memoryFolder(t *testing.T, options string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	folder := t.TempDir()
	must.Do(t, unix.Mount("test", folder, "tmpfs", 0, options))
	t.Cleanup(func() {
		expect.Do(t, unix.Unmount(folder, unix.MNT_DETACH))
	})
	return folder
}

func write(t *testing.T, path string) {
	t.Helper()
	must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, []byte("secret"), 0o600)))
}

// TestLeftoverFilesOfSession: a session that goes on with other clients loses what an ended one left.
func TestLeftoverFilesOfSession(t *testing.T) {
	w, s, status := started(t, func(o *Options) { o.LeftoverInterval = 50 * time.Millisecond })
	w.client(0, status)
	eventually(t, "the client", func() bool { return len(statusOf(t, s, one.ID).Clients) == 1 })
	secret, mine := filepath.Join(status.ShmDir, "secret"), filepath.Join(status.ShmDir, "mine")
	write(t, mine)
	hosttest.KeepOpen(t, mine)
	write(t, secret)
	eventually(t, "what the ended container left to go", func() bool {
		_, err := os.Lstat(secret)
		return errors.Is(err, os.ErrNotExist)
	})
	if got := hosttest.Files(t, status.ShmDir); !slices.Contains(got, "mine") {
		t.Errorf("left %q", got)
	}
	w.client(0, status)
	eventually(t, "another client", func() bool { return len(statusOf(t, s, one.ID).Clients) == 2 })
	if got := statusOf(t, s, one.ID); got.Phase != mps.Running || got.Losses != 0 {
		t.Errorf("got %v", got)
	}
}

// TestForeignProcess: what a client left goes after its end, whatever processes without a claim have open. To read that takes as
// long as they like: each may have a million descriptors, and a line in procfs for each file that one of them watches. Here it
// takes for ever, unless nobody reads it.
func TestForeignProcess(t *testing.T) {
	w := newWorld(t)
	w.options.LeftoverInterval = 50 * time.Millisecond
	proc, descriptors := foreignProcess(t)
	w.options.Roots.Proc = proc
	s := w.supervisor()
	status := must.Get(s.Ensure(t.Context(), one))(t)
	left := filepath.Join(status.ShmDir, "left")
	write(t, left)

	read := make(chan *os.File)
	go func() {
		file, err := os.OpenFile(descriptors, os.O_WRONLY, 0) // when it is opened to be read
		expect.Do(t, err)
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
		reader := must.Get(os.OpenFile(descriptors, os.O_RDONLY|unix.O_NONBLOCK, 0))(t)
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
	must.Do(t, err)
	for _, entry := range entries {
		// Of processes that come later nothing is read.
		must.Do(t, os.Symlink(filepath.Join("/proc", entry.Name()), filepath.Join(proc, entry.Name())))
	}
	const unused = 5000000 // above all that the kernel gives to processes
	process := filepath.Join(proc, strconv.Itoa(unused))
	descriptors = filepath.Join(process, "fdinfo", "3")
	err = errors.Join(os.MkdirAll(filepath.Dir(descriptors), 0o755), os.MkdirAll(filepath.Join(process, "ns"), 0o755), unix.Mkfifo(descriptors, 0o600))
	for _, name := range []string{"cgroup", "mountinfo", "maps", "ns/mnt", "cwd"} {
		err = errors.Join(err, os.Symlink(filepath.Join("/proc/self", name), filepath.Join(process, name)))
	}
	must.Do(t, err)
	return proc, descriptors
}
