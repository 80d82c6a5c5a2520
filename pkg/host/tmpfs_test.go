// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestShrinkTmpfs: whoever keeps a folder and a file of a file system in memory has next to nothing of it. What cannot be
// emptied is said, and does not grow.
func TestShrinkTmpfs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	const content = 1 << 20
	for name, test := range map[string]struct {
		keep func(t *testing.T, file *os.File)
		most int64
		says string
	}{
		"a file":             {func(*testing.T, *os.File) {}, 4096, ""},
		"a file in a folder": {func(*testing.T, *os.File) {}, 4096, ""},
		"an unlinked file": {func(t *testing.T, file *os.File) {
			if err := os.Remove(file.Name()); err != nil {
				t.Fatal(err)
			}
		}, content, "somebody keeps 1024 KiB"},
		"a file with a lease": {func(t *testing.T, file *os.File) {
			if _, err := unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
				t.Fatal(err)
			}
		}, content, "somebody keeps 1024 KiB"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "memory")
			if err := MountTmpfs(path, 16*content, ""); err != nil {
				t.Fatal(err)
			}
			folder, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = folder.Close() }()
			inside := filepath.Join(path, "content")
			if name == "a file in a folder" {
				inside = filepath.Join(path, "a/b/content")
			}
			if err := errors.Join(os.MkdirAll(filepath.Dir(inside), 0o755), os.WriteFile(inside, make([]byte, content), 0o600)); err != nil {
				t.Fatal(err)
			}
			file, err := os.OpenFile(inside, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = file.Close() }()
			test.keep(t, file)
			if err := ShrinkTmpfs(t.Context(), path); (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %q", err, test.says)
			}
			if err := RemoveTmpfs(path); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the folder is still there: %v", err)
			}
			_, _ = file.WriteAt(make([]byte, 4*content), 0)
			if fd, err := unix.Openat(int(folder.Fd()), "more", unix.O_CREAT|unix.O_WRONLY, 0o600); err == nil {
				_, _ = unix.Write(fd, make([]byte, content))
				_ = unix.Close(fd)
			}
			var room unix.Statfs_t
			if err := unix.Fstatfs(int(folder.Fd()), &room); err != nil {
				t.Fatal(err)
			}
			if used := int64(room.Blocks-room.Bfree) * room.Bsize; used > test.most {
				t.Errorf("%d KiB are kept, want %d at most", used>>10, test.most>>10)
			}
		})
	}
}
