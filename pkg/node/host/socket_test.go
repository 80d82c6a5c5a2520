// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestListenUnix: whatever the umask is and whatever is there, nobody else may connect.
func TestListenUnix(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	defer unix.Umask(unix.Umask(0))
	for _, what := range []string{"new", "after one that was killed"} {
		listener, err := ListenUnix(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != os.ModeSocket|0o600 {
			t.Errorf("%s: %v, %v", what, info.Mode(), err)
		}
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", path)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		_ = conn.Close()
		socket, ok := listener.(*net.UnixListener)
		if !ok {
			t.Fatalf("%s: got %T", what, listener)
		}
		socket.SetUnlinkOnClose(false)
		must(t, listener.Close())
	}

	file := filepath.Join(shortDir(t), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	if _, err := ListenUnix(t.Context(), file); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("where a file is: got %v", err)
	}
	long := filepath.Join(shortDir(t), strings.Repeat("x", MaxSocketPath))
	if _, err := ListenUnix(t.Context(), long); err == nil || !strings.Contains(err.Error(), "at most 107") {
		t.Errorf("a long path: got %v", err)
	}
	if _, err := ListenUnix(t.Context(), "/does/not/exist/s"); err == nil || !strings.Contains(err.Error(), "/does/not/exist/s") {
		t.Errorf("no folder: got %v", err)
	}
}

// shortDir is a folder for sockets; that of t.TempDir may have a longer name than these
// may have.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
