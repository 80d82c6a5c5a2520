// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// enterable makes the driver root a system of its own, as a driver's container has.
func (w *world) enterable() {
	w.Helper()
	proc := filepath.Join(w.root, "proc")
	must.Do(w, errors.Join(os.Remove(proc), os.Mkdir(proc, 0o755), unix.Mount("/proc", proc, "", unix.MS_BIND|unix.MS_REC, "")))
	w.Cleanup(func() {
		expect.Do(w, unix.Unmount(proc, unix.MNT_DETACH))
	})
	for _, path := range []string{"tmp", "dev/shm"} {
		must.Do(w, os.MkdirAll(filepath.Join(w.root, path), 0o755))
	}
	must.Do(w, unix.Mknod(filepath.Join(w.root, "dev/null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	for _, path := range []string{"lib", "lib64", "usr/lib", "usr/lib64"} {
		from, to := filepath.Join("/", path), filepath.Join(w.root, path)
		target, err := os.Readlink(from)
		switch {
		case err == nil:
			err = os.Symlink(target, to)
		case errors.Is(err, os.ErrNotExist):
			continue
		default:
			if err = os.MkdirAll(to, 0o755); err == nil {
				err = unix.Mount(from, to, "", unix.MS_BIND, "")
			}
			if err == nil {
				w.Cleanup(func() {
					// Who reads in procfs of a process that has ended may keep its programs for a moment.
					eventually(w, to+" to be unused", func() bool { return unix.Unmount(to, 0) == nil })
				})
			}
		}
		must.Do(w, err)
	}
}

// nodesElsewhere moves the device nodes out of the driver root, and returns the root that
// has them then.
func (w *world) nodesElsewhere() string {
	w.Helper()
	elsewhere, dev := filepath.Join(filepath.Dir(w.root), "host"), filepath.Join(w.root, "dev")
	must.Do(w, errors.Join(os.Mkdir(elsewhere, 0o755), os.Rename(dev, filepath.Join(elsewhere, "dev")), os.Mkdir(dev, 0o755)))
	return elsewhere
}

// TestNodesElsewhere: a daemon gets the device nodes of the host where its root has none.
func TestNodesElsewhere(t *testing.T) {
	w := newWorld(t)
	w.enterable()
	w.options.Roots.Dev = w.nodesElsewhere()
	s := w.supervisor()
	must.Get(s.Ensure(t.Context(), one))(t)
	root := filepath.Join("/proc", strconv.Itoa(daemonOf(t, s, one.ID)), "root")
	for _, node := range host.RequiredNodes() {
		expect.Do(t, expect.Err(os.Stat(filepath.Join(root, node))), "the daemon has no", node)
	}
	expect.Len(t, must.Get(os.ReadDir(filepath.Join(w.root, "dev")))(t), 0, "the root itself")
	expect.Do(t, s.Stop(t.Context(), one.ID))
	w.nothingLeft(one.ID)
}

// TestNoNodes: a daemon that could have no server is not started.
func TestNoNodes(t *testing.T) {
	if _, err := (host.Roots{}).Node("/dev/nvidia-uvm"); err == nil {
		t.Skip("this machine has the nodes itself")
	}
	w := newWorld(t)
	w.nodesElsewhere()
	_, err := w.supervisor().Ensure(t.Context(), one)
	if want := "the device node nvidiactl is neither in " + w.root + "/dev nor in /dev on this node"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	w.nothingLeft(one.ID)
}

func TestOwnRoot(t *testing.T) {
	w := newWorld(t)
	w.enterable()
	s := w.supervisor()
	status := must.Get(s.Ensure(t.Context(), one))(t)
	var seen map[string]string
	data, err := os.ReadFile(filepath.Join(status.ShmDir, "seen.json"))
	if err == nil {
		err = json.Unmarshal(data, &seen)
	}
	if err != nil || seen["CUDA_MPS_PIPE_DIRECTORY"] != "/tmp/pipe/daemon" || seen["args"] != "-f" {
		t.Errorf("the daemon saw %v, %v", seen, err)
	}
	// It is in there, and nothing of its view is in ours.
	if root, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(daemonOf(t, s, one.ID)), "root")); err != nil || root != w.root {
		t.Errorf("its root is %q, %v", root, err)
	}
	for _, path := range []string{"tmp", "dev/shm"} {
		expect.Len(t, must.Get(os.ReadDir(filepath.Join(w.root, path)))(t), 0, path)
	}
	raised := clone(one)
	raised.ThreadPercentage = 50
	if status, err = s.Ensure(t.Context(), raised); err != nil {
		t.Fatal(err)
	}
	inEffect(t, s, status)
	kill(t, daemonOf(t, s, one.ID))
	reaches(t, s, one.ID, mps.Running, 1)
	expect.Do(t, s.Stop(t.Context(), one.ID))
	w.nothingLeft(one.ID)
}

func TestOwnRootWithoutPlaces(t *testing.T) {
	w := newWorld(t)
	w.enterable()
	must.Do(t, os.Remove(filepath.Join(w.root, "dev/shm")))
	s := w.supervisor()
	_, err := s.Ensure(t.Context(), one)
	expect.Says(t, err, w.root+"/dev/shm")
	w.nothingLeft(one.ID)
}

func TestLaunchArguments(t *testing.T) {
	for _, args := range [][]string{nil, {"-x", "--", "/bin/true"}, {"-shm", "/a"}} {
		expect.Says(t, Launch(args), LaunchCommand, args)
	}
}

// TestContextOfSessions: a session that containers could not use is not started.
func TestContextOfSessions(t *testing.T) {
	w := newWorld(t)
	w.options.SELinuxContext = "nobody_u:nothing_r:nowhere_t:s0"
	s := w.supervisor()
	if _, err := s.Ensure(t.Context(), one); err == nil || !strings.Contains(err.Error(), "nowhere_t") || !strings.Contains(err.Error(), "SELINUX_CONTEXT") {
		t.Errorf("got %v", err)
	}
	w.nothingLeft(one.ID)
}
