// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// enter adds processes of a new owner and returns it.
func enter(t *testing.T, f *File, processes ...machine.Process) uint64 {
	t.Helper()
	owner, err := f.Own()
	must.Do(t, err)
	err = f.Update(func(m *machine.Machine) error {
		for _, p := range processes {
			p.Owner = owner
			m.Processes = append(m.Processes, p)
		}
		return nil
	})
	must.Do(t, err)
	return owner
}

func pids(m *machine.Machine) (out []int) {
	for _, p := range m.Processes {
		out = append(out, p.PID)
	}
	return out
}

// Entries are there as long as the file of their owner is open.
func TestOwner(t *testing.T) {
	m := full()
	m.Processes = []machine.Process{{PID: 1}}
	path, f := create(t, m)
	var owners []*File
	for i := range 2 {
		o, err := Open(path)
		must.Do(t, err)
		defer o.Close()
		owner := enter(t, o, machine.Process{PID: 10 + i}, machine.Process{PID: 20 + i, Kind: machine.MPSClient})
		expect.Equal(t, must.Get(o.Own())(t), owner, "a second owner of the same file")
		owners = append(owners, o)
	}
	check := func(who *File, want ...int) {
		t.Helper()
		expect.Same(t, pids(snapshot(t, who)), want)
	}
	check(f, 1, 10, 20, 11, 21)
	check(owners[0], 1, 10, 20, 11, 21)
	generation, err := f.Generation()
	must.Do(t, err)
	owners[0].Close()
	check(f, 1, 11, 21)
	check(owners[1], 1, 11, 21)
	expect.Equal(t, must.Get(f.Generation())(t), generation, "generation after looking")
	// A writer clears up, so that the file does not fill.
	err = f.Update(func(m *machine.Machine) error {
		expect.Same(t, pids(m), []int{1, 11, 21})
		return nil
	})
	must.Do(t, err)
	owners[1].Close()
	check(f, 1)
}

// childVariable makes this test program the process that is killed.
const childVariable = "GPUSIM_TEST_OWNER"

// An owner that is killed is gone at once, for readers who may not write, too.
func TestOwnerIsKilled(t *testing.T) {
	if path := os.Getenv(childVariable); path != "" {
		f := must.Get(Open(path))(t)
		enter(t, f, machine.Process{PID: os.Getpid()})
		fmt.Println("entered")
		select {}
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, who then becomes somebody else")
	}
	m := full()
	m.Processes = nil
	path, f := create(t, m)
	letIn(t, path)
	child := exec.Command(os.Args[0], "-test.run=^TestOwnerIsKilled$")
	child.Env = append(os.Environ(), childVariable+"="+path)
	out := must.Get(child.StdoutPipe())(t)
	must.Do(t, child.Start())
	said := make([]byte, len("entered"))
	if _, err := out.Read(said); err != nil || string(said) != "entered" {
		t.Fatalf("child: %q, %v", said, err)
	}
	expect.Same(t, pids(snapshot(t, f)), []int{child.Process.Pid})
	asNobody(t, func() {
		r, err := Open(path)
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Close()
		expect.Same(t, pids(snapshot(t, r)), []int{child.Process.Pid}, "seen read-only")
		expect.Is(t, expect.Err(r.Own()), ErrReadOnly, "own without the right to write")
	})
	must.Do(t, child.Process.Kill())
	_ = child.Wait()
	expect.Len(t, pids(snapshot(t, f)), 0, "left")
}

func TestWantedFaults(t *testing.T) {
	m := full()
	m.Processes = nil
	path, f := create(t, m)
	o := must.Get(Open(path))(t)
	defer o.Close()
	owner := enter(t, o, machine.Process{GPU: 0}, machine.Process{GPU: 1}, machine.Process{GPU: 1})
	wanted := func() []int {
		t.Helper()
		gpus, err := o.WantedFaults(owner)
		must.Do(t, err)
		return gpus
	}
	expect.Len(t, wanted(), 0, "faults on")
	must.Do(t, f.Update(func(m *machine.Machine) error { m.Processes[2].Fault = true; return nil }))
	expect.Same(t, wanted(), []int{1})
}

func TestBootIDAndPlace(t *testing.T) {
	path, f := create(t, full())
	expect.Equal(t, must.Get(f.BootID())(t), full().BootID, "boot id")
	expect.Equal(t, must.Get(f.InPlace())(t), true, "in place")
	must.Do(t, Create(path, full()))
	expect.Equal(t, must.Get(f.InPlace())(t), false, "in place after it was replaced")
}

func TestStrike(t *testing.T) {
	m := full()
	m.Faults = []machine.Fault{
		{ID: 1, Function: "*", GPU: -1},
		{ID: 2, Function: "mps_quit", GPU: 1, Skip: 1, Times: 1, Hang: true, Effect: machine.Proceed},
		{ID: 3, Function: "mps_quit", GPU: -1, Effect: machine.Pretend},
	}
	_, f := create(t, m)
	for _, c := range []struct {
		function string
		gpus     []int
		want     int
	}{
		{"mps_ps", nil, 0}, {"nvmlInit_v2", nil, 1}, {"mps_quit", nil, 3}, {"mps_quit", []int{0}, 3},
		{"mps_quit", []int{0, 1}, 3}, {"mps_quit", []int{0, 1}, 2}, {"mps_quit", []int{1}, 3},
	} {
		s := must.Get(f.Strike(c.function, c.gpus...))(t)
		got := 0
		if s != nil {
			got = s.ID
		}
		expect.Equal(t, got, c.want, c.function, "on", c.gpus, "struck by")
	}
	var counts []string
	for _, fault := range snapshot(t, f).Faults {
		counts = append(counts, fmt.Sprint(fault.Seen, "/", fault.Struck))
	}
	expect.Equal(t, strings.Join(counts, " "), "1/1 3/1 5/4", "seen and struck", counts)
	calls, err := f.Calls()
	if err != nil || calls["mps_quit"] != 5 {
		t.Errorf("calls: %v, %v", calls, err)
	}
}

// asNobody runs fn on a thread whose effective user is not root. The thread is
// not used again.
func asNobody(t *testing.T, fn func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlock: the thread ends with us
		// The raw call changes this thread only.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0)); errno != 0 {
			t.Errorf("become nobody: %v", errno)
			return
		}
		fn()
	}()
	<-done
}
