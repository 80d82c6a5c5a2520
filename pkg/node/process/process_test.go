// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/util/wait"
)

// headlessVariable makes the test program end its first thread and no other.
const headlessVariable = "PARTAGE_TEST_HEADLESS"

// init runs on the process's first thread, where this leaves it.
func init() {
	if os.Getenv(headlessVariable) != "" {
		runtime.LockOSThread()
	}
}

// TestWaitedFor: a process for which another part of this program has waited.
func TestWaitedFor(t *testing.T) {
	cmd := exec.Command("true")
	must(t, cmd.Start())
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
	if os.Getenv(headlessVariable) != "" {
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // of the thread
	}
	os.Exit(m.Run())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, question func() bool) {
	t.Helper()
	if err := wait.Until(t.Context(), func() (bool, error) { return question(), nil }); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// headless starts a process whose first thread ends.
func headless(t *testing.T) ID {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = []string{headlessVariable + "=1"}
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	id, err := Identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// A process has ended when all of its threads have. One that was killed may still
// have a thread that waits for the GPU.
func TestFirstThreadEnds(t *testing.T) {
	p := headless(t)
	eventually(t, "the first thread to end", func() bool {
		st, err := readStat(p.PID)
		return err == nil && st.state == 'Z'
	})
	if !p.Alive() {
		t.Error("it is taken for ended while it has threads")
	}
	if err := p.Kill(t.Context()); err != nil || p.Alive() {
		t.Errorf("alive %t, %v", p.Alive(), err)
	}
	if st, err := readStat(p.PID); err == nil && st.threads > 1 {
		t.Errorf("it has %d threads left", st.threads)
	}
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
	must(t, other.Signal(unix.SIGKILL))
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
		if ok && (st.state != 'S' || st.parent != 7 || st.threads != 3 || st.start != 4242) {
			t.Errorf("%q: got %+v", text, st)
		}
	}
}
