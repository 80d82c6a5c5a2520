// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package program

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/must"
)

// openFolder returns the folder as another process has it, and closes it at the end.
func openFolder(t *testing.T, path string) *Folder {
	t.Helper()
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f
}

func write(t *testing.T, path, content string) {
	t.Helper()
	must.Do(t, os.WriteFile(path, []byte(content), mode))
}

func install(t *testing.T, f *Folder, program string) string {
	t.Helper()
	return must.Get(f.Install(program))(t)
}

func read(t *testing.T, path string) string {
	t.Helper()
	data := must.Get(os.ReadFile(path))(t)
	return string(data)
}

func stat(t *testing.T, path string) os.FileInfo {
	t.Helper()
	return must.Get(os.Lstat(path))(t)
}

// names are those of the files in a folder.
func names(t *testing.T, path string) []string {
	t.Helper()
	entries := must.Get(os.ReadDir(path))(t)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func TestInstall(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(t.TempDir(), "a-hook")
	f := openFolder(t, dir)
	write(t, program, "one")
	one := install(t, f, program)
	if want := regexp.MustCompile("^" + dir + "/a-hook-[0-9a-f]{12}$"); !want.MatchString(one) {
		t.Errorf("the copy is %s", one)
	}
	first := stat(t, one)
	if first.Mode() != mode || read(t, one) != "one" {
		t.Errorf("the copy has mode %v and %q", first.Mode(), read(t, one))
	}
	if again := install(t, openFolder(t, dir), program); again != one || !os.SameFile(first, stat(t, one)) {
		t.Error("a program that is there was copied again")
	}
	write(t, program, "two")
	two := install(t, f, program)
	if two == one || read(t, two) != "two" {
		t.Errorf("another program is %s with %q, beside %s", two, read(t, two), one)
	}
	if !os.SameFile(first, stat(t, one)) || read(t, one) != "one" {
		t.Error("the first program was replaced")
	}
	absent := filepath.Join(dir, "absent")
	if _, err := f.Install(absent); err == nil || !strings.Contains(err.Error(), absent) {
		t.Errorf("without a program: %v", err)
	}
}

// TestInstallRepairs: whatever is found in the place of a copy.
func TestInstallRepairs(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"another content of the same length": func(path string) error { return os.WriteFile(path, []byte("two"), mode) },
		"half of it":                         func(path string) error { return os.Truncate(path, 1) },
		"more than it":                       func(path string) error { return os.WriteFile(path, []byte("one and more"), mode) },
		"not executable":                     func(path string) error { return os.Chmod(path, 0o600) },
		"all may write":                      func(path string) error { return os.Chmod(path, 0o777) },
		"with the rights of its owner":       func(path string) error { return os.Chmod(path, mode|os.ModeSetuid) },
		"a link to the same": func(path string) error {
			return errors.Join(os.Rename(path, path+".moved"), os.Symlink(path+".moved", path))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			program := filepath.Join(t.TempDir(), "hook")
			write(t, program, "one")
			path := install(t, openFolder(t, dir), program)
			before := must.Get(os.Open(path))(t)
			defer func() { _ = before.Close() }()
			must.Do(t, spoil(path))
			if again := install(t, openFolder(t, dir), program); again != path {
				t.Errorf("the copy is %s now", again)
			}
			if stat(t, path).Mode() != mode || read(t, path) != "one" {
				t.Errorf("the copy has mode %v and %q", stat(t, path).Mode(), read(t, path))
			}
		})
	}
}

// TestInstallTogether: instances that start at the same time.
func TestInstallTogether(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(t.TempDir(), "hook")
	content := bytes.Repeat([]byte("hook"), 1<<18)
	write(t, program, string(content))
	var all sync.WaitGroup
	for range 8 {
		f := openFolder(t, dir)
		all.Go(func() {
			if _, err := f.Install(program); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if have := names(t, dir); len(have) != 1 || read(t, filepath.Join(dir, have[0])) != string(content) {
		t.Errorf("the folder has %v", have)
	}
}

// node is a folder in which three versions of a program were installed, the last two by plugins that still run.
type node struct {
	t              *testing.T
	dir            string
	old, now, next string
	running, f     *Folder
}

func newNode(t *testing.T) *node {
	n := &node{t: t, dir: t.TempDir()}
	program := filepath.Join(t.TempDir(), "hook")
	for content, path := range map[string]*string{"old": &n.old, "now": &n.now, "next": &n.next} {
		write(t, program, content)
		f := openFolder(t, n.dir)
		*path = install(t, f, program)
		switch content {
		case "old":
			f.Close() // as if its process had ended
		case "now":
			n.running = f
		case "next":
			n.f = f
		}
	}
	return n
}

// sweep removes what specs do not name, and fails unless these are there then.
func (n *node) sweep(named []string, want ...string) {
	n.t.Helper()
	n.f.RemoveUnused(n.t.Context(), func() (map[string]bool, error) {
		names := map[string]bool{}
		for _, path := range named {
			names[path] = true
		}
		return names, nil
	})
	n.has(want...)
}

func (n *node) has(want ...string) {
	n.t.Helper()
	var have []string
	for _, path := range []string{n.old, n.now, n.next} {
		if _, err := os.Lstat(path); err == nil {
			have = append(have, path)
		}
	}
	if diff := cmp.Diff(want, have); diff != "" {
		n.t.Errorf("-want +got:\n%s", diff)
	}
}

func TestRemoveUnused(t *testing.T) {
	for name, test := range map[string]func(n *node){
		"what specs name stays": func(n *node) {
			n.sweep([]string{n.old}, n.old, n.now, n.next)
			n.sweep(nil, n.now, n.next)
		},
		"the other plugin ends": func(n *node) {
			n.running.Close()
			// It has written a spec at the last moment.
			n.sweep([]string{n.now}, n.now, n.next)
			n.sweep(nil, n.next)
		},
		"specs that cannot be read": func(n *node) {
			n.f.RemoveUnused(n.t.Context(), func() (map[string]bool, error) { return nil, errors.New("half of a spec") })
			n.has(n.old, n.now, n.next)
		},
		"files of others": func(n *node) {
			write(n.t, filepath.Join(n.dir, "README"), "")
			write(n.t, host.TemporaryName(n.old), "o") // of one who was killed
			n.sweep(nil, n.now, n.next)
			if got := names(n.t, n.dir); len(got) != 3 || !slices.Contains(got, "README") {
				n.t.Errorf("the folder has %v", got)
			}
		},
	} {
		t.Run(name, func(t *testing.T) { test(newNode(t)) })
	}
}

// TestSpecsAreReadUnderTheLock: a process that ends writes its last spec before its lock
// is free, so that a spec read afterwards names what it has used.
func TestSpecsAreReadUnderTheLock(t *testing.T) {
	n := newNode(t)
	looked := false
	n.f.RemoveUnused(t.Context(), func() (map[string]bool, error) {
		file, err := os.Open(n.old)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			t.Errorf("it is not locked: %v", err)
		}
		looked = true
		return nil, file.Close()
	})
	if !looked {
		t.Error("no spec was read")
	}
}
