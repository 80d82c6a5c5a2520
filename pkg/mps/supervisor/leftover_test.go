// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
)

// files lists what is in a folder.
func files(t *testing.T, folder string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, _ os.DirEntry, err error) error {
		if path != folder {
			names = append(names, strings.TrimPrefix(path, folder+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return names
}

// memoryFolder is a /dev/shm for tests.
func memoryFolder(t *testing.T, options string) string {
	t.Helper()
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

// look looks into one folder.
func (l *leftover) look(t *testing.T, folder string) (int, error) {
	t.Helper()
	owners, err := l.owners()
	if err != nil {
		return 0, err
	}
	defer owners.close()
	return l.remove(t.Context(), owners, folder)
}

// passedOn waits until the kernel has passed on what is in a folder to the cgroups above
// those that are gone.
func passedOn(t *testing.T, folder string) {
	t.Helper()
	eventually(t, "the kernel to pass on what the containers left", func() bool {
		owners, err := later().owners()
		if err != nil {
			t.Fatal(err)
		}
		defer owners.close()
		for _, name := range files(t, folder) {
			path := filepath.Join(folder, name)
			if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
				continue
			}
			file, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			cgroup, err := owners.of(file)
			_ = file.Close()
			if err == nil && !owners.live[cgroup] && !owners.hasEnded(cgroup) {
				return false
			}
		}
		return true
	})
}

// What ended pods left goes, unless somebody has it; what those left that go on stays.
func TestLeftoverFiles(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=1m,nr_inodes=100")
	at := func(what, name string) string { return what + "=" + filepath.Join(folder, name) }
	first := x.container(1, at("write", "ended"), at("write", "ended-in/a/b/file"), at("write", "ended-open"), at("write", "ended-mapped"),
		at("write", "entered/file"), at("empty", "ended-empty"), at("reserve", "ended-reserved"), at("write", "mixed/ended"))
	second := x.container(2, at("write", "restarted"))
	x.container(2, at("write", "live"), at("empty", "live-empty"), at("reserve", "live-reserved"), at("write", "live-in/file"),
		at("write", "mixed/live"), at("open", "ended-open"), at("map", "ended-mapped"), at("enter", "entered/file/.."))
	outside := filepath.Join(t.TempDir(), "outside")
	err := errors.Join(os.WriteFile(outside, []byte("x"), 0o600), os.Symlink(filepath.Dir(outside), filepath.Join(folder, "ended-in/link")),
		// The daemon's.
		os.WriteFile(filepath.Join(folder, "cuda.shm"), []byte("x"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	first()
	second()
	before := files(t, folder)

	l := &leftover{proc: "/proc", grace: time.Minute, now: time.Now}
	look := func() int {
		t.Helper()
		removed, err := l.look(t, folder)
		if err != nil {
			t.Fatal(err)
		}
		return removed
	}
	if removed := look(); removed != 0 || !slices.Equal(before, files(t, folder)) {
		t.Errorf("%d files went at once", removed)
	}
	l.now = func() time.Time { return time.Now().Add(2 * time.Minute) }
	passedOn(t, folder)
	look()
	want := []string{
		"cuda.shm", "ended-empty", "ended-in", "ended-in/a", "ended-in/a/b", "ended-in/link", "ended-mapped", "ended-open", "ended-reserved", "entered",
		"live", "live-empty", "live-in", "live-in/file", "live-reserved", "mixed", "mixed/live", "restarted",
	}
	if got := files(t, folder); !slices.Equal(got, want) {
		t.Errorf("left:\n%q, want\n%q", got, want)
	}
	if look() != 0 {
		t.Error("something went in the second round")
	}

	// When room is scarce, also what has no content.
	for i := range 70 {
		if err := os.WriteFile(filepath.Join(folder, "flood"+strconv.Itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(folder, "cuda.shm"), make([]byte, 900<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	look()
	want = []string{"cuda.shm", "ended-mapped", "ended-open", "entered", "live", "live-in", "live-in/file", "mixed", "mixed/live", "restarted"}
	if got := files(t, folder); !slices.Equal(got, want) {
		t.Errorf("left where room is scarce:\n%q, want\n%q", got, want)
	}
	if data, err := os.ReadFile(outside); err != nil || string(data) != "x" {
		t.Errorf("outside: %q, %v", data, err)
	}
}

// Whatever a tenant has built, one look ends, and the room is free again.
func TestLeftoverFilesWithoutEnd(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=16m,nr_inodes=10000")
	deep := filepath.Join(folder, strings.Repeat("d/", 500))
	x.container(1, "write="+filepath.Join(deep, "file"))()
	for i := 0; ; i++ {
		if err := os.Mkdir(filepath.Join(folder, "wide"+strconv.Itoa(i)), 0o700); errors.Is(err, unix.ENOSPC) {
			break
		} else if err != nil || i > 10000 {
			t.Fatal(err)
		}
	}
	l := &leftover{proc: "/proc", grace: time.Minute, now: func() time.Time { return time.Now().Add(2 * time.Minute) }}
	if _, err := l.look(t, folder); err != nil {
		t.Error(err)
	}
	if got := files(t, folder); len(got) > 0 {
		t.Errorf("%d are left, %q…", len(got), got[0])
	}
}

// A supervisor that cannot see the processes removes nothing.
func TestLeftoverFilesOfUnknown(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=1m")
	x.container(1, "write="+filepath.Join(folder, "ended"))()
	l := &leftover{proc: t.TempDir(), now: time.Now}
	if _, err := l.look(t, folder); err == nil || !strings.Contains(err.Error(), "procfs") {
		t.Errorf("got %v", err)
	}
	if got := files(t, folder); len(got) != 1 {
		t.Errorf("left %q", got)
	}
}

// A session that goes on with other clients loses what an ended one left.
func TestLeftoverFilesOfSession(t *testing.T) {
	w := newWorld(t)
	x := newTenants(t)
	w.options.LeftoverInterval = 100 * time.Millisecond
	s := w.supervisor()
	status, err := s.Ensure(t.Context(), one)
	if err != nil {
		t.Fatal(err)
	}
	w.client(0, status)
	eventually(t, "the client", func() bool { return len(statusOf(t, s, one.ID).Clients) == 1 })
	secret, mine := filepath.Join(status.ShmDir, "secret"), filepath.Join(status.ShmDir, "mine")
	x.container(2, "write="+mine)
	before := files(t, status.ShmDir)
	x.container(1, "write="+secret)()
	eventually(t, "what the ended container left to go", func() bool {
		_, err := os.Lstat(secret)
		return errors.Is(err, os.ErrNotExist)
	})
	if got := files(t, status.ShmDir); !slices.Equal(before, got) {
		t.Errorf("left %q, want %q", got, before)
	}
	w.client(0, status)
	eventually(t, "another client", func() bool { return len(statusOf(t, s, one.ID).Clients) == 2 })
	if got := statusOf(t, s, one.ID); got.Phase != mps.Running || got.Losses != 0 {
		t.Errorf("got %v", got)
	}
}
