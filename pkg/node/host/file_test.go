// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/must"
)

// replacements are all that replace a file.
var replacements = map[string]func(path string, data []byte, mode fs.FileMode) error{"synced": ReplaceFile, "unsynced": ReplaceUnsynced}

func TestReplaceFile(t *testing.T) {
	for name, replace := range replacements {
		t.Run(name, func(t *testing.T) { testReplace(t, replace) })
	}
}

func testReplace(t *testing.T, replace func(path string, data []byte, mode fs.FileMode) error) {
	t.Helper()
	folder := t.TempDir()
	path := filepath.Join(folder, "a.json")
	// What a killed process left behind is no obstacle.
	must.Do(t, os.WriteFile(TemporaryName(path), []byte(strings.Repeat("old", 100)), 0o600))
	for _, content := range []string{"one", "two, longer", "3"} {
		must.Do(t, replace(path, []byte(content), 0o644))
		got, err := os.ReadFile(path)
		if err != nil || string(got) != content {
			t.Errorf("got %q, %v, want %q", got, err, content)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("got %v, %v", info.Mode(), err)
	}
	if entries, err := os.ReadDir(folder); err != nil || len(entries) != 1 {
		t.Errorf("got %v, %v, want one file", entries, err)
	}
}

func TestReplaceFileFails(t *testing.T) {
	for name, replace := range replacements {
		t.Run(name, func(t *testing.T) { testReplaceFails(t, replace) })
	}
}

func testReplaceFails(t *testing.T, replace func(path string, data []byte, mode fs.FileMode) error) {
	t.Helper()
	folder := t.TempDir()
	path := filepath.Join(folder, "a.json")
	must.Do(t, os.MkdirAll(filepath.Join(path, "not-empty"), 0o755))
	if err := replace(path, nil, 0o644); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(TemporaryName(path)); !os.IsNotExist(err) {
		t.Errorf("temporary file left behind: %v", err)
	}
	if err := replace(filepath.Join(folder, "no", "a.json"), nil, 0o644); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestRemoveFile(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "a.json")
	for _, name := range []string{path, TemporaryName(path)} {
		must.Do(t, os.WriteFile(name, nil, 0o600))
	}
	for range 2 {
		must.Do(t, RemoveFile(path))
	}
	if err := RemoveFile(filepath.Join(folder, "no", "a.json")); err != nil {
		t.Errorf("in an absent folder: %v", err)
	}
	if entries, err := os.ReadDir(folder); err != nil || len(entries) != 0 {
		t.Errorf("got %v, %v, want none", entries, err)
	}
}

// TestListenUnix: whatever the umask is and whatever is there, nobody else may connect.
func TestListenUnix(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	defer unix.Umask(unix.Umask(0))
	for _, what := range []string{"new", "after one that was killed"} {
		listener := must.Get(ListenUnix(t.Context(), path))(t)
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
		must.Do(t, listener.Close())
	}

	file := filepath.Join(shortDir(t), "file")
	must.Do(t, os.WriteFile(file, nil, 0o600))
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
	dir := must.Get(os.MkdirTemp("/tmp", "s"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
