// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/must"
)

const (
	deepLevels = 100_000
	wideFiles  = 200_000
	// removeVariable makes this program remove the path that it names.
	removeVariable = "PARTAGE_TEST_REMOVE"
)

// memoryFolder is a file system of its own, which goes without anybody removing files.
func memoryFolder(t *testing.T, options string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	path := t.TempDir()
	must.Do(t, unix.Mount("test", path, "tmpfs", 0, options))
	t.Cleanup(func() {
		must.Do(t, unix.Unmount(path, unix.MNT_DETACH))
	})
	return path
}

// manyFiles has room for what the tests make.
const manyFiles = "size=64m,nr_inodes=400k"

// deepen makes folders in folders, with a file in each hundredth.
func deepen(t *testing.T, path string, levels int) {
	t.Helper()
	must.Do(t, os.Mkdir(path, 0o755))
	at, err := unix.Open(path, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for i := 0; err == nil && i < levels; i++ {
		if i%100 == 0 {
			err = unix.Mknodat(at, "file", unix.S_IFREG|0o600, 0)
		}
		if err == nil {
			err = unix.Mkdirat(at, "d", 0o755)
		}
		var next int
		if err == nil {
			next, err = unix.Openat(at, "d", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		}
		err = errors.Join(err, unix.Close(at))
		at = next
	}
	must.Do(t, errors.Join(err, unix.Close(at)))
}

func widen(t *testing.T, path string, files int) {
	t.Helper()
	must.Do(t, os.Mkdir(path, 0o755))
	at, err := unix.Open(path, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for i := 0; err == nil && i < files; i++ {
		err = unix.Mknodat(at, strconv.Itoa(i), unix.S_IFREG|0o600, 0)
	}
	must.Do(t, errors.Join(err, unix.Close(at)))
}

// TestRemoveTreeWithFewDescriptors is the part of TestRemoveTree in a process of its own.
func TestRemoveTreeWithFewDescriptors(t *testing.T) {
	path := os.Getenv(removeVariable)
	if path == "" {
		t.Skip("TestRemoveTree runs it")
	}
	must.Do(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 256, Max: 256}))
	must.Do(t, RemoveTree(t.Context(), path))
}

// Whatever a tenant made of a folder, it goes, with few descriptors.
func TestRemoveTree(t *testing.T) {
	folder := memoryFolder(t, manyFiles)
	for name, build := range map[string]func(t *testing.T, path string){
		"deep": func(t *testing.T, path string) { t.Helper(); deepen(t, path, deepLevels) },
		"wide": func(t *testing.T, path string) { t.Helper(); widen(t, path, wideFiles) },
		"deep and wide": func(t *testing.T, path string) {
			t.Helper()
			deepen(t, path, 1000)
			for i := range 50 {
				deepen(t, filepath.Join(path, "d", "d", strconv.Itoa(i)), 500)
				widen(t, filepath.Join(path, "d", "d", "d", strconv.Itoa(i)), 500)
			}
		},
		"a file":         func(t *testing.T, path string) { t.Helper(); write(t, "/", path, "x") },
		"an empty one":   func(t *testing.T, path string) { t.Helper(); widen(t, path, 0) },
		"nothing at all": func(*testing.T, string) {},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(folder, "tree")
			build(t, path)
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRemoveTreeWithFewDescriptors$")
			cmd.Env = append(os.Environ(), removeVariable+"="+path)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
			empty(t, folder)
		})
	}
}

func empty(t *testing.T, folder string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

// Links and mounts do not lead out.
func TestRemoveTreeStays(t *testing.T) {
	folder := memoryFolder(t, manyFiles)
	outside, tree := filepath.Join(folder, "outside"), filepath.Join(folder, "tree")
	write(t, outside, "file", "x")
	write(t, tree, "a/b/c", "x")
	link(t, tree, "a/link", outside)
	link(t, tree, "link", "../outside")
	link(t, tree, "a/b/up", "..")
	must.Do(t, RemoveTree(t.Context(), tree))
	if _, err := os.Stat(filepath.Join(outside, "file")); err != nil {
		t.Error(err)
	}

	mounted := filepath.Join(tree, "a", "mounted")
	must.Do(t, errors.Join(os.MkdirAll(mounted, 0o755), unix.Mount(outside, mounted, "", unix.MS_BIND, "")))
	if err := RemoveTree(t.Context(), tree); err == nil {
		t.Error("no error although something is mounted")
	}
	if _, err := os.Stat(filepath.Join(outside, "file")); err != nil {
		t.Error(err)
	}
}

// What a process that was killed, or had no more time, has left is for the next one.
func TestRemoveTreeGoesOn(t *testing.T) {
	folder := memoryFolder(t, manyFiles)
	tree := filepath.Join(folder, "tree")
	deepen(t, tree, 3000)
	// Stopped at different places.
	for i := range 5 {
		if err := RemoveTree(&endsAfter{Context: t.Context(), left: i * 500}, tree); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	}
	must.Do(t, RemoveTree(t.Context(), tree))
	empty(t, folder)
	must.Do(t, RemoveTree(t.Context(), filepath.Join(folder, "absent/tree")))
}

// endsAfter is a context that ends after it was asked a number of times.
type endsAfter struct {
	context.Context //nolint:containedctx // it is one

	left int
}

func (c *endsAfter) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}

func TestClearFolder(t *testing.T) {
	folder := memoryFolder(t, manyFiles)
	deepen(t, filepath.Join(folder, "deep"), 5000)
	widen(t, filepath.Join(folder, "wide"), 5000)
	link(t, folder, "link", "deep")
	must.Do(t, ClearFolder(t.Context(), folder))
	empty(t, folder)
	if err := ClearFolder(t.Context(), filepath.Join(folder, "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// A bound on the number of files holds for folders, too.
func TestMountTmpfsBounds(t *testing.T) {
	path := filepath.Join(memoryFolder(t, manyFiles), "bounded")
	must.Do(t, MountTmpfs("test", path, 1<<20, ""))
	flags := func() int64 {
		var st unix.Statfs_t
		must.Do(t, unix.Statfs(path, &st))
		return st.Flags
	}
	if want := int64(unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC | 0x2000); flags()&want != want {
		t.Errorf("flags %x, want %x", flags(), want)
	}
	made := 0
	for err := error(nil); err == nil && made < 1e6; made++ {
		err = os.Mkdir(filepath.Join(path, fmt.Sprint(made)), 0o755)
	}
	if int64(made) > TmpfsFiles(1<<20) {
		t.Errorf("%d folders", made)
	}
	must.Do(t, RemoveTmpfs(path))
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	// Without the mount, as a reboot leaves it, and without anything.
	must.Do(t, os.Mkdir(path, 0o755))
	for range 2 {
		must.Do(t, RemoveTmpfs(path))
	}
	empty(t, filepath.Dir(path))
}
