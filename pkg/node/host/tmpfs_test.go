// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRemoveTmpfs: a process that keeps a folder and a file of a file system in memory holds next to nothing, or what there was room
// for if it cannot be emptied.
func TestRemoveTmpfs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	const content, room = 1 << 20, 4 << 20
	for name, test := range map[string]struct {
		keep func(t *testing.T, file *os.File)
		most int64
	}{
		"a file": {func(*testing.T, *os.File) {}, 4096},
		"an unlinked file": {func(t *testing.T, file *os.File) {
			must(t, os.Remove(file.Name()))
		}, room},
		"a file with a lease": {func(t *testing.T, file *os.File) {
			if _, err := unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
				t.Fatal(err)
			}
		}, room},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "memory")
			must(t, MountTmpfs("test", path, room, ""))
			inside := filepath.Join(path, "a/b/content")
			must(t, errors.Join(os.MkdirAll(filepath.Dir(inside), 0o755), os.WriteFile(inside, make([]byte, content), 0o600)))
			folder, err := os.Open(filepath.Join(path, "a"))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = folder.Close() }()
			file, err := os.OpenFile(inside, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = file.Close() }()
			test.keep(t, file)
			if kept, err := EmptyTmpfs(t.Context(), path); !kept || err != nil {
				t.Errorf("kept: %v, %v", kept, err)
			}
			must(t, RemoveTmpfs(path))
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the folder is still there: %v", err)
			}
			_, _ = file.WriteAt(make([]byte, 2*room), 0)
			if fd, err := unix.Openat(int(folder.Fd()), "more", unix.O_CREAT|unix.O_WRONLY, 0o600); err == nil {
				_ = unix.Close(fd)
				t.Error("files can be made")
			}
			var is unix.Statfs_t
			must(t, unix.Fstatfs(int(folder.Fd()), &is))
			if used := int64(is.Blocks-is.Bfree) * is.Bsize; used > test.most {
				t.Errorf("%d KiB are kept, want %d at most", used>>10, test.most>>10)
			}
		})
	}
}

// TestEmptyTmpfs: nothing is kept when nobody has anything open, and what is no file system in memory is left alone.
func TestEmptyTmpfs(t *testing.T) {
	path := memoryFolder(t, manyFiles)
	writeFile(t, filepath.Join(path, "a/b/file"))
	if kept, err := EmptyTmpfs(t.Context(), path); kept || err != nil {
		t.Errorf("kept: %v, %v", kept, err)
	}
	empty(t, path)
	if _, err := EmptyTmpfs(t.Context(), "/proc/self"); err == nil {
		t.Error("no error")
	}
}
