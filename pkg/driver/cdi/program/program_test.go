// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package program

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/host"
)

// openFolder returns the folder as another process has it, and closes it at the end.
func openFolder(t *testing.T, path string, earlier ...string) *Folder {
	t.Helper()
	f, err := Open(path, earlier...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

func install(t *testing.T, f *Folder, program string) string {
	t.Helper()
	path, err := f.Install(program)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func stat(t *testing.T, path string) os.FileInfo {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// names are those of the files in a folder.
func names(t *testing.T, path string) []string {
	t.Helper()
	entries, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
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
		"an unfinished copy of another": func(path string) error {
			return os.WriteFile(host.TemporaryName(filepath.Dir(path)+"/other-0123456789ab"), []byte("o"), 0o600)
		},
		"an unfinished copy beside it": func(path string) error { return os.WriteFile(host.TemporaryName(path), []byte("o"), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			program := filepath.Join(t.TempDir(), "hook")
			write(t, program, "one")
			path := install(t, openFolder(t, dir), program)
			before, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = before.Close() }()
			if err := spoil(path); err != nil {
				t.Fatal(err)
			}
			if again := install(t, openFolder(t, dir), program); again != path {
				t.Errorf("the copy is %s now", again)
			}
			if stat(t, path).Mode() != mode || read(t, path) != "one" {
				t.Errorf("the copy has mode %v and %q", stat(t, path).Mode(), read(t, path))
			}
			if have := names(t, dir); slices.ContainsFunc(have, func(name string) bool { return strings.HasSuffix(name, ".tmp") }) {
				t.Errorf("the folder has %v", have)
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

// node is a folder in which three versions of a program were installed, one of them by
// a plugin that still runs.
type node struct {
	t              *testing.T
	dir            string
	old, now, next string
	running        *Folder
	earlier        string
	f              *Folder

	mu sync.Mutex
	// named is what specs name; broken is why that is not known.
	named  map[string]bool
	broken error
}

// name lets specs name these programs and no others.
func (n *node) name(paths ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.named)
	for _, path := range paths {
		n.named[path] = true
	}
}

// damage makes specs unreadable, or readable again.
func (n *node) damage(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.broken = err
}

func (n *node) specs() (map[string]bool, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.named), n.broken
}

func newNode(t *testing.T) *node {
	n := &node{t: t, dir: t.TempDir(), named: map[string]bool{}}
	program := filepath.Join(t.TempDir(), "hook")
	n.earlier = filepath.Join(t.TempDir(), "mps-hook")
	write(t, n.earlier, "earlier")
	write(t, program, "old")
	old := openFolder(t, n.dir)
	n.old = install(t, old, program)
	old.Close() // as if its process had ended
	write(t, program, "now")
	n.running = openFolder(t, n.dir)
	n.now = install(t, n.running, program)
	write(t, program, "next")
	n.f = openFolder(t, n.dir, n.earlier)
	n.next = install(t, n.f, program)
	return n
}

// after lets sweeps go on for some time, and fails unless these are there then.
func (n *node) after(d time.Duration, want ...string) {
	n.t.Helper()
	time.Sleep(d)
	synctest.Wait()
	var have []string
	for _, path := range []string{n.old, n.now, n.next, n.earlier} {
		if _, err := os.Lstat(path); err == nil {
			have = append(have, path)
		}
	}
	if diff := cmp.Diff(want, have); diff != "" {
		n.t.Errorf("-want +got:\n%s", diff)
	}
}

const (
	soon = grace - time.Second
	// enough is when something that becomes unused now has gone.
	enough = grace + 2*interval
)

func TestKeepClean(t *testing.T) {
	for name, test := range map[string]func(n *node){
		"what specs name stays": func(n *node) {
			n.name(n.old, n.earlier)
			n.after(10*enough, n.old, n.now, n.next, n.earlier)
		},
		"not at once": func(n *node) {
			n.after(soon, n.old, n.now, n.next, n.earlier)
			n.after(enough-soon, n.now, n.next)
		},
		"the last claim ends": func(n *node) {
			n.name(n.old, n.earlier)
			n.after(enough, n.old, n.now, n.next, n.earlier)
			n.name(n.earlier)
			n.after(soon, n.old, n.now, n.next, n.earlier)
			n.after(enough-soon, n.now, n.next, n.earlier)
			n.name()
			n.after(enough, n.now, n.next)
		},
		"named again meanwhile": func(n *node) {
			n.after(soon, n.old, n.now, n.next, n.earlier)
			n.name(n.old)
			n.after(enough, n.old, n.now, n.next)
			n.name()
			n.after(soon, n.old, n.now, n.next)
			n.after(enough-soon, n.now, n.next)
		},
		"the other plugin ends": func(n *node) {
			n.after(10*enough, n.now, n.next)
			// It has written a spec at the last moment.
			n.name(n.now)
			n.running.Close()
			n.after(enough, n.now, n.next)
			n.name()
			n.after(enough, n.next)
		},
		"specs that cannot be read": func(n *node) {
			n.damage(errors.New("half of a spec"))
			n.after(enough, n.old, n.now, n.next, n.earlier)
			n.damage(nil)
			n.after(enough, n.now, n.next)
		},
		"another process installs": func(n *node) {
			lock := n.running.folderLock()
			if err := lock.Lock(); err != nil {
				n.t.Fatal(err)
			}
			n.after(enough, n.old, n.now, n.next, n.earlier)
			if err := lock.Unlock(); err != nil {
				n.t.Fatal(err)
			}
			n.after(enough, n.now, n.next)
		},
		"files of others": func(n *node) {
			write(n.t, filepath.Join(n.dir, "README"), "")
			n.after(enough, n.now, n.next)
			if !slices.Contains(names(n.t, n.dir), "README") {
				n.t.Error("it is gone")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t)
				ctx, cancel := context.WithCancel(t.Context())
				defer synctest.Wait()
				defer cancel()
				go n.f.KeepClean(ctx, n.specs)
				test(n)
			})
		})
	}
}

// TestSpecsAreReadUnderTheLock: a process that ends writes its last spec before its lock
// is free, so that a spec read afterwards names what it has used.
func TestSpecsAreReadUnderTheLock(t *testing.T) {
	n := newNode(t)
	looked := 0
	if err := n.f.sweep(t.Context(), func() (map[string]bool, error) {
		for _, path := range []string{n.old, n.earlier} {
			file, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
				t.Errorf("%s is not locked: %v", path, err)
			}
			_ = file.Close()
			looked++
		}
		return n.specs()
	}); err != nil || looked != 2 {
		t.Errorf("looked %d times: %v", looked, err)
	}
}
