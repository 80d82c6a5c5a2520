// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host/hosttest"
)

// memoryFolder is a /dev/shm for tests.
func memoryFolder(t *testing.T, options string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	folder := t.TempDir()
	if err := unix.Mount("test", folder, "tmpfs", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(folder, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return folder
}

func write(t *testing.T, path string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, []byte("secret"), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// TestLeftoverFilesOfSession: a session that goes on with other clients loses what an ended one left.
func TestLeftoverFilesOfSession(t *testing.T) {
	w := newWorld(t)
	w.options.LeftoverInterval = 50 * time.Millisecond
	s := w.supervisor()
	status, err := s.Ensure(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
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
