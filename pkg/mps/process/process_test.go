// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/wait"
)

const (
	// idleVariable makes the test program wait to be killed.
	idleVariable = "PARTAGE_TEST_IDLE"
	// headlessVariable makes it end its first thread and no other.
	headlessVariable = "PARTAGE_TEST_HEADLESS"
)

// init runs on the process's first thread, where this leaves it.
func init() {
	if os.Getenv(headlessVariable) != "" {
		runtime.LockOSThread()
	}
}

// TestWaitedFor: a process whose end another part of this program has seen to, as Reap does.
func TestWaitedFor(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Wait4(cmd.Process.Pid, nil, 0, nil); err != nil {
		t.Fatal(err)
	}
	p := &Process{done: make(chan struct{})}
	p.await(cmd)
	if !p.Ended() || p.Exit().Known || p.How() != "exit status unknown" {
		t.Errorf("ended: %t, %+v, %q", p.Ended(), p.Exit(), p.How())
	}
}

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(headlessVariable) != "":
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // of the thread
	case os.Getenv(idleVariable) != "":
		told := make(chan os.Signal, 1)
		signal.Notify(told, syscall.SIGTERM)
		<-told
	}
	os.Exit(m.Run())
}

func eventually(t *testing.T, what string, question func() bool) {
	t.Helper()
	if err := wait.Until(t.Context(), func() (bool, error) { return question(), nil }); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// mark is on the processes of a test.
func mark(t *testing.T) Mark {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Base(self)
	return Mark{Env: "PARTAGE_TEST=" + t.TempDir(), Commands: []string{name[:min(15, len(name))]}}
}

// idle starts a process that has the mark.
func idle(t *testing.T, m Mark, attributes *syscall.SysProcAttr, env ...string) ID {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env, cmd.SysProcAttr = append(env, m.Env), attributes
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	id, err := Identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the program to run", func() bool {
		st, err := readStat(id.PID)
		return err == nil && st.name == m.Commands[0]
	})
	return id
}

// A process in a container cannot pass for one of this host.
func TestMarkInOtherNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
	m := mark(t)
	ours := idle(t, m, nil, idleVariable+"=1")
	foreign := idle(t, m, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}, idleVariable+"=1")
	if found, err := m.Find(); err != nil || len(found) != 1 || found[0] != ours {
		t.Errorf("got %v, %v, want %v", found, err, ours)
	}
	if err := m.Kill(t.Context(), nil); err != nil || ours.Alive() || !foreign.Alive() {
		t.Errorf("ours %t, foreign %t, %v", ours.Alive(), foreign.Alive(), err)
	}
}

// A process has ended when all of its threads have. One that was killed may still
// have a thread that waits for the GPU.
func TestFirstThreadEnds(t *testing.T) {
	m := mark(t)
	p := idle(t, m, nil, headlessVariable+"=1")
	eventually(t, "the first thread to end", func() bool {
		st, err := readStat(p.PID)
		return err == nil && st.state == 'Z'
	})
	if !p.Alive() {
		t.Error("it is taken for ended while it has threads")
	}
	if err := (Mark{Env: "PARTAGE_TEST=another"}).Kill(t.Context(), []ID{p}); err != nil || p.Alive() {
		t.Errorf("alive %t, %v", p.Alive(), err)
	}
	if st, err := readStat(p.PID); err == nil && st.threads > 1 {
		t.Errorf("it has %d threads left", st.threads)
	}
}

// A process that is about to run another program has no environment for a moment.
func TestMarkWhileProgramStarts(t *testing.T) {
	m := mark(t)
	p := idle(t, m, nil, idleVariable+"=1")
	read, empty := environ, true
	t.Cleanup(func() { environ = read })
	environ = func(id ID) ([]byte, error) {
		if id == p && empty {
			empty = false
			return nil, nil
		}
		return read(id)
	}
	if found, err := m.Find(); err != nil || len(found) != 1 || found[0] != p {
		t.Errorf("got %v, %v, want %v", found, err, p)
	}
}

// Searches do not wait again and again for a process that is stuck.
func TestStuckReading(t *testing.T) {
	id := ID{PID: 1 << 30}
	stuck := make(chan struct{})
	var began atomic.Int32
	read := environ
	environ = func(ID) ([]byte, error) {
		began.Add(1)
		<-stuck
		return nil, errors.New("it has ended")
	}
	for range 3 {
		if data := environmentOf(id); data != nil {
			t.Errorf("got %q", data)
		}
	}
	if began.Load() != 1 {
		t.Errorf("%d readings, want one that all share", began.Load())
	}
	close(stuck)
	// Who shares it knows when it has ended.
	if _, err := readings.Do(id, time.Minute, func() ([]byte, error) { return nil, nil }); err != nil {
		t.Error(err)
	}
	environ = read
}

// A PID that is reused is not the process.
func TestReusedPID(t *testing.T) {
	self, err := Identify(os.Getpid())
	if err != nil || !self.Alive() {
		t.Fatalf("this process: %v", err)
	}
	other := ID{PID: self.PID, Start: self.Start - 1}
	if p, err := Adopt(other, nil); other.Alive() || p != nil || err != nil {
		t.Errorf("alive %t, adopted %v, %v", other.Alive(), p, err)
	}
	if err := other.Signal(unix.SIGKILL); err != nil {
		t.Error(err)
	}
}

func TestParseStat(t *testing.T) {
	const fields = "S 7 5 6 0 -1 0 0 0 0 0 0 0 0 0 0 0 3 0 4242 0"
	for text, ok := range map[string]bool{
		"12 (a) " + fields: true, "12 (a) S 7) " + fields: true,
		"": false, "12": false, "12 (a)": false, "12 (a) ": false, "12 (a) S 7": false, "12 (a) S x 5 6 0 -1 0 0 0 0 0 0 0 0 0 0 0 3 0 4242 0": false,
	} {
		st, err := parseStat(12, text)
		if (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
		if ok && (st.state != 'S' || st.parent != 7 || st.session != 6 || st.threads != 3 || st.start != 4242) {
			t.Errorf("%q: got %+v", text, st)
		}
	}
}
