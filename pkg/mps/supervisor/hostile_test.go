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
	"github.com/partage-dev/partage/pkg/mps/process"
)

// process is one that looks like a server to who does not look closely.
func (w *world) process(attributes *syscall.SysProcAttr, env ...string) process.ID {
	w.Helper()
	cmd := exec.Command(filepath.Join(w.root, "usr/bin", serverName))
	cmd.Env, cmd.SysProcAttr = append(env, idleVariable+"=1"), attributes
	if err := cmd.Start(); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	id, err := process.Identify(cmd.Process.Pid)
	if err != nil {
		w.Fatal(err)
	}
	eventually(w, "the program to run", func() bool {
		name, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(id.PID), "comm"))
		return err == nil && strings.TrimSpace(string(name)) == serverName[:15]
	})
	return id
}

// TestImpostor: a daemon in the place of the right one cannot have processes of the
// host killed by calling them its server.
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
	if err := s.Stop(t.Context(), one.ID); err != nil {
		t.Error(err)
	}
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
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	s := w.supervisor()
	eventually(t, "the start to be over", func() bool { return len(s.List()) == 0 })
	if _, err := s.Ensure(t.Context(), mps.Spec{ID: "etc", Devices: []string{gpuA}}); !errors.Is(err, mps.ErrInvalid) || !strings.Contains(err.Error(), kept[0]) {
		t.Errorf("got %v", err)
	}
	if err := s.Stop(t.Context(), "lib"); err != nil {
		t.Error(err)
	}
	for _, path := range kept {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}

// TestFullFolders: root in a container fills the folder of the sockets, and not what
// that is in.
func TestFullFolders(t *testing.T) {
	_, s, status := started(t)
	var failure error
	for i := 0; failure == nil; i++ {
		if i == 64 {
			t.Fatal("there is no end of it")
		}
		failure = os.WriteFile(filepath.Join(status.PipeDir, strconv.Itoa(i)), make([]byte, 64<<10), 0o600)
	}
	if !errors.Is(failure, unix.ENOSPC) {
		t.Error(failure)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(status.PipeDir), "beside"), make([]byte, 64<<10), 0o600); err != nil {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(filepath.Dir(status.PipeDir), "beside")); err != nil {
		t.Error(err)
	}
	// What is there still works, and goes.
	inEffect(t, s, status)
	if err := s.Stop(t.Context(), status.Spec.ID); err != nil {
		t.Error(err)
	}
}
