// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// process is one that looks like a server to who does not look closely.
func (w *world) process(attributes *syscall.SysProcAttr, env ...string) process.ID {
	w.Helper()
	cmd := exec.Command(filepath.Join(w.root, "usr/bin", serverName))
	cmd.Env, cmd.SysProcAttr = append(env, idleVariable+"=1"), attributes
	w.runs(cmd)
	id := must.Get(process.Identify(cmd.Process.Pid))(w)
	eventually(w, "the program to run", func() bool {
		name, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(id.PID), "comm"))
		return err == nil && strings.TrimSpace(string(name)) == serverName[:15]
	})
	return id
}

// TestImpostor: a daemon that is wrong about its servers cannot have processes of the
// host killed by calling them its own.
func TestImpostor(t *testing.T) {
	w, s, before := started(t)
	victim := w.process(nil)
	w.script(script{Claim: victim.PID})
	kill(t, before.Servers[0])
	eventually(t, "the lie to be found out", func() bool {
		return strings.Contains(statusOf(t, s, one.ID).Message, "PID "+strconv.Itoa(victim.PID)+" its server")
	})
	if _, err := s.Ensure(t.Context(), one); err == nil {
		t.Error("no error")
	}
	expect.Do(t, s.Stop(t.Context(), one.ID))
	w.nothingLeft(one.ID)
	if !victim.Alive() {
		t.Error("it was killed")
	}
}

// TestForeignFolders: the wrong folder is a mistake that costs nothing.
func TestForeignFolders(t *testing.T) {
	w := newWorld(t)
	kept := []string{filepath.Join(w.dir, "etc", "passwd"), filepath.Join(w.dir, "lib", "log", "file"), filepath.Join(w.dir, "lib", "x")}
	for _, path := range kept {
		must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)))
	}
	s := w.supervisor()
	eventually(t, "the start to be over", func() bool { return len(s.List()) == 0 })
	if _, err := s.Ensure(t.Context(), mps.Spec{ID: "etc", Devices: []string{gpuA}}); !errors.Is(err, mps.ErrInvalid) || !strings.Contains(err.Error(), kept[0]) {
		t.Errorf("got %v", err)
	}
	expect.Do(t, s.Stop(t.Context(), "lib"))
	for _, path := range kept {
		expect.Do(t, expect.Err(os.Stat(path)))
	}
}

// TestFullFolders: whoever fills the folder of the sockets, as a daemon may that logs
// there, does not fill what that is in.
func TestFullFolders(t *testing.T) {
	w, s, status := started(t)
	f := w.folder(one.ID)
	var failure error
	for i := 0; failure == nil; i++ {
		if i == 64 {
			t.Fatal("there is no end of it")
		}
		failure = os.WriteFile(filepath.Join(f.daemonPipe(), strconv.Itoa(i)), make([]byte, 64<<10), 0o600)
	}
	expect.Is(t, failure, unix.ENOSPC)
	beside := filepath.Join(string(f), "beside")
	expect.Do(t, errors.Join(os.WriteFile(beside, make([]byte, 64<<10), 0o600), os.Remove(beside)))
	// What is there still works, and goes.
	inEffect(t, s, status)
	expect.Do(t, s.Stop(t.Context(), status.Spec.ID))
}

// TestDeepFolders: root in a container makes the folder of the sockets as deep as it can,
// and the next daemon starts all the same.
func TestDeepFolders(t *testing.T) {
	_, s, status := started(t)
	made, room := 0, int(host.TmpfsFiles(pipeSize))
	for path := status.PipeDir; made < room; made++ {
		path = filepath.Join(path, "d")
		if err := os.Mkdir(path, 0o000); err != nil {
			break
		}
	}
	if made < room/2 || made == room {
		t.Errorf("%d folders fit", made)
	}
	kill(t, daemonOf(t, s, one.ID))
	reaches(t, s, one.ID, mps.Running, 1)
	expect.Is(t, expect.Err(os.Lstat(filepath.Join(status.PipeDir, "d"))), os.ErrNotExist)
}

// TestHalfRemoved: what a supervisor had no time to remove is removed by the next one.
func TestHalfRemoved(t *testing.T) {
	w := newWorld(t)
	left := filepath.Join(w.dir, "session")
	must.Do(t, os.MkdirAll(filepath.Join(left, ".removed-1", "deep"), 0o700))
	s := w.supervisor()
	eventually(t, "the rest to be gone", func() bool { return len(s.List()) == 0 })
	w.nothingLeft("session")
}
