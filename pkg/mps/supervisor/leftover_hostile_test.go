// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/host/hosttest"
)

// later is a leftover for which everything is old enough.
func later() *leftover {
	return &leftover{proc: "/proc", grace: time.Minute, now: func() time.Time { return time.Now().Add(2 * time.Minute) }}
}

// A pod may have no process for a while: between an init container and the next one, or
// while a container that crashes waits, where the runtime keeps no process for the pod. At
// first, its files are charged to the cgroup of the container, which is gone.
func TestLeftoverFilesOfPodWithoutProcess(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=1m")
	end := x.container(1, "write="+filepath.Join(folder, "waiting"))
	next := filepath.Join(x.pod(1), "next")
	if err := os.Mkdir(next, 0o755); err != nil {
		t.Fatal(err)
	}
	end()
	if removed, err := later().look(t, folder); err != nil || removed != 0 {
		t.Errorf("%d files of a pod that goes on went, %v", removed, err)
	}
	passedOn(t, folder)
	if removed, err := later().look(t, folder); err != nil || removed != 0 {
		t.Errorf("%d files of a pod that goes on went later, %v", removed, err)
	}
	if err := errors.Join(os.Remove(next), os.Remove(x.pod(1))); err != nil {
		t.Fatal(err)
	}
	passedOn(t, folder)
	if removed, err := later().look(t, folder); err != nil || removed != 1 {
		t.Errorf("%d files of the ended pod went, %v", removed, err)
	}
}

// A process that has ended, and that nobody waits for, may have been in a cgroup that is
// gone (cgroup-v2.rst of Linux). It must not keep what others left.
func TestLeftoverFilesAndZombie(t *testing.T) {
	x := newTenants(t)
	folder, proc := memoryFolder(t, "size=1m"), t.TempDir()
	x.container(1, "write="+filepath.Join(folder, "ended"))()
	for _, name := range []string{"1", "kpagecgroup", strconv.Itoa(os.Getpid())} {
		if err := os.Symlink(filepath.Join("/proc", name), filepath.Join(proc, name)); err != nil {
			t.Fatal(err)
		}
	}
	zombie := filepath.Join(proc, "999999999")
	err := errors.Join(os.Mkdir(zombie, 0o755),
		os.WriteFile(filepath.Join(zombie, "cgroup"), []byte("0::/kubepods/pod0a1b2c3d-0000-4000-8000-000000000000/gone (deleted)\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	passedOn(t, folder)
	l := later()
	l.proc = proc
	if removed, err := l.look(t, folder); err != nil || removed != 1 {
		t.Errorf("%d files went, %v", removed, err)
	}
}

// More files of a tenant that goes on than are looked up at a time do not keep what others
// left.
func TestLeftoverFilesBehindMany(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=1m")
	write := func(format string) (does []string) {
		for i := range 20 {
			does = append(does, "write="+filepath.Join(folder, fmt.Sprintf(format, i)))
		}
		return does
	}
	x.container(2, write("first%d")...)
	end := x.container(1, "write="+filepath.Join(folder, "ended"))
	x.container(2, write("last%d")...)
	end()
	passedOn(t, folder)
	l := later()
	l.most = 8
	left := func() bool { return slices.Contains(files(t, folder), "ended") }
	for looks := 0; left(); looks++ {
		if looks == 41/8+1 {
			t.Fatalf("it is there after %d looks", looks)
		}
		if _, err := l.look(t, folder); err != nil {
			t.Fatal(err)
		}
	}
	if got := files(t, folder); len(got) != 40 {
		t.Errorf("%d files are left, want 40", len(got))
	}
}

// The first thread of a program may end before others, and then shows no files.
func TestLeftoverFilesOfProcessWithoutFirstThread(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=1m")
	at := func(what, name string) string { return what + "=" + filepath.Join(folder, name) }
	end := x.container(1, at("write", "open"), at("write", "mapped"))
	x.container(2, at("open", "open"), at("map", "mapped"), headless)
	end()
	passedOn(t, folder)
	if _, err := later().look(t, folder); err != nil {
		t.Fatal(err)
	}
	if got, want := files(t, folder), []string{"mapped", "open"}; !slices.Equal(got, want) {
		t.Errorf("left %q, want %q", got, want)
	}
}

// A file system that does not answer holds up nobody who only looks for users of others.
func TestLeftoverFilesBesideHungFileSystem(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=1m")
	x.container(1, "write="+filepath.Join(folder, "ended"))()
	passedOn(t, folder)
	hosttest.HungFolder(t)
	type result struct {
		removed int
		err     error
	}
	looked := make(chan result, 1)
	go func() {
		removed, err := later().look(t, folder)
		looked <- result{removed, err}
	}()
	select {
	case r := <-looked:
		if r.err != nil || r.removed != 1 {
			t.Errorf("%d files went, %v", r.removed, r.err)
		}
	case <-time.After(time.Minute):
		t.Error("it hangs")
	}
}
