// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// process is one that looks like a server to who does not look closely.
func (w *world) process(attributes *syscall.SysProcAttr, env ...string) processID {
	w.Helper()
	cmd := exec.Command(filepath.Join(w.root, "usr/bin", serverName))
	cmd.Env, cmd.SysProcAttr = env, attributes
	if err := cmd.Start(); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	id, err := identify(cmd.Process.Pid)
	if err != nil {
		w.Fatal(err)
	}
	eventually(w, "the program to run", func() bool {
		st, err := readStat(id.PID)
		return err == nil && st.name == serverName[:15]
	})
	return id
}

// TestImpostor: a daemon in the place of the right one cannot have processes of the
// host killed by calling them its server.
func TestImpostor(t *testing.T) {
	w, s, before := started(t)
	victim := w.process(nil)
	w.script(script{Calls: victim.PID})
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
	if !victim.alive() {
		t.Error("it was killed")
	}
}

// TestForeignProcesses: what calls itself a server in a container is nobody's.
func TestForeignProcesses(t *testing.T) {
	w := newWorld(t)
	marker := w.folder("gpu-0").marker()
	ours := w.process(nil, marker)
	foreign := w.process(&syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}, marker)
	if found, err := marked(marker); err != nil || len(found) != 1 || found[0] != ours {
		t.Errorf("got %v, %v, want %v", found, err, ours)
	}
	if err := killMarked(t.Context(), marker, nil); err != nil || ours.alive() || !foreign.alive() {
		t.Errorf("ours %t, foreign %t, %v", ours.alive(), foreign.alive(), err)
	}
}

// TestFirstThreadEnds: a process has ended when all of its threads have. One that
// was killed may still have a thread that waits for the GPU.
func TestFirstThreadEnds(t *testing.T) {
	w := newWorld(t)
	p := w.process(nil, headlessVariable+"=1")
	eventually(t, "the first thread to end", func() bool {
		st, err := readStat(p.PID)
		return err == nil && st.state == 'Z'
	})
	if !p.alive() {
		t.Error("it is taken for ended while it has threads")
	}
	if err := killMarked(t.Context(), w.folder("gpu-0").marker(), []processID{p}); err != nil || p.alive() {
		t.Errorf("alive %t, %v", p.alive(), err)
	}
	if st, err := readStat(p.PID); err == nil && st.threads > 1 {
		t.Errorf("it has %d threads left", st.threads)
	}
}

// TestStuckReading: others do not wait for a process again and again.
func TestStuckReading(t *testing.T) {
	id := processID{PID: 1 << 30}
	readings.Store(id, &reading{began: time.Now().Add(-time.Minute), done: make(chan struct{})})
	defer readings.Delete(id)
	began := time.Now()
	if data := environmentOf(id); data != nil || time.Since(began) > 500*time.Millisecond {
		t.Errorf("got %q after %s", data, time.Since(began))
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
	if _, err := s.Ensure(t.Context(), Spec{ID: "etc", Devices: []string{gpuA}}); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), kept[0]) {
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

// TestAnyText: what programs say may be no text, and does not keep others from
// being told of other sessions.
func TestAnyText(t *testing.T) {
	answer := statusesToProto([]Status{{Message: "a\xff", LastLoss: "\xc3", Losses: 1}})
	data, err := proto.Marshal(answer)
	if err != nil || len(data) == 0 {
		t.Fatal(err)
	}
	if got := statusesFromProto(answer)[0].Message; got != "a\uFFFD" {
		t.Errorf("got %q", got)
	}
}

func TestBounded(t *testing.T) {
	var output bounded
	n, err := io.Copy(&output, bytes.NewReader(make([]byte, 1<<20)))
	if n != 1<<20 || err != nil || len(output.String()) != maxOutput {
		t.Errorf("took %d, kept %d, %v", n, len(output.String()), err)
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
