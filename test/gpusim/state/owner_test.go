// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// enter adds processes of a new owner and returns it.
func enter(t *testing.T, f *File, processes ...machine.Process) uint64 {
	t.Helper()
	owner, err := f.Own()
	if err != nil {
		t.Fatal(err)
	}
	err = f.Update(func(m *machine.Machine) error {
		for _, p := range processes {
			p.Owner = owner
			m.Processes = append(m.Processes, p)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
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
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		owner := enter(t, o, machine.Process{PID: 10 + i}, machine.Process{PID: 20 + i, Kind: machine.MPSClient})
		if again, err := o.Own(); err != nil || again != owner {
			t.Errorf("a second owner of the same file: %d, %v", again, err)
		}
		owners = append(owners, o)
	}
	check := func(who *File, want ...int) {
		t.Helper()
		if d := cmp.Diff(want, pids(snapshot(t, who))); d != "" {
			t.Error(d)
		}
	}
	check(f, 1, 10, 20, 11, 21)
	check(owners[0], 1, 10, 20, 11, 21)
	generation, err := f.Generation()
	if err != nil {
		t.Fatal(err)
	}
	owners[0].Close()
	check(f, 1, 11, 21)
	check(owners[1], 1, 11, 21)
	if now, err := f.Generation(); err != nil || now != generation {
		t.Errorf("looking changed the file: generation %d, then %d (%v)", generation, now, err)
	}
	// A writer clears up, so that the file does not fill.
	err = f.Update(func(m *machine.Machine) error {
		if d := cmp.Diff([]int{1, 11, 21}, pids(m)); d != "" {
			t.Error(d)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	owners[1].Close()
	check(f, 1)
}

// childVariable makes this test program the process that is killed.
const childVariable = "GPUSIM_TEST_OWNER"

// An owner that is killed is gone at once, for readers who may not write, too.
func TestOwnerIsKilled(t *testing.T) {
	if path := os.Getenv(childVariable); path != "" {
		f, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
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
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, len("entered"))
	if _, err := out.Read(said); err != nil || string(said) != "entered" {
		t.Fatalf("child: %q, %v", said, err)
	}
	if d := cmp.Diff([]int{child.Process.Pid}, pids(snapshot(t, f))); d != "" {
		t.Error(d)
	}
	asNobody(t, func() {
		r, err := Open(path)
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Close()
		if d := cmp.Diff([]int{child.Process.Pid}, pids(snapshot(t, r))); d != "" {
			t.Errorf("seen read-only: %s", d)
		}
		if _, err := r.Own(); !errors.Is(err, ErrReadOnly) {
			t.Errorf("own without the right to write: %v", err)
		}
	})
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait()
	if left := pids(snapshot(t, f)); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestWantedFaults(t *testing.T) {
	m := full()
	m.Processes = nil
	path, f := create(t, m)
	o, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	owner := enter(t, o, machine.Process{GPU: 0}, machine.Process{GPU: 1}, machine.Process{GPU: 1})
	wanted := func() []int {
		t.Helper()
		gpus, err := o.WantedFaults(owner)
		if err != nil {
			t.Fatal(err)
		}
		return gpus
	}
	if gpus := wanted(); len(gpus) != 0 {
		t.Errorf("faults on %v", gpus)
	}
	err = f.Update(func(m *machine.Machine) error { m.Processes[2].Fault = true; return nil })
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]int{1}, wanted()); d != "" {
		t.Error(d)
	}
}

func TestBootIDAndPlace(t *testing.T) {
	path, f := create(t, full())
	if id, err := f.BootID(); err != nil || id != full().BootID {
		t.Errorf("boot id %q, %v", id, err)
	}
	if in, err := f.InPlace(); err != nil || !in {
		t.Errorf("in place: %v, %v", in, err)
	}
	if err := Create(path, full()); err != nil {
		t.Fatal(err)
	}
	if in, err := f.InPlace(); err != nil || in {
		t.Errorf("in place after it was replaced: %v, %v", in, err)
	}
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
		s, err := f.Strike(c.function, c.gpus...)
		if err != nil {
			t.Fatal(err)
		}
		got := 0
		if s != nil {
			got = s.ID
		}
		if got != c.want {
			t.Errorf("%s on %v: struck by %d, want %d", c.function, c.gpus, got, c.want)
		}
	}
	var counts []string
	for _, fault := range snapshot(t, f).Faults {
		counts = append(counts, fmt.Sprint(fault.Seen, "/", fault.Struck))
	}
	if want := "1/1 3/1 5/4"; strings.Join(counts, " ") != want {
		t.Errorf("seen and struck: %v, want %s", counts, want)
	}
	calls, err := f.Calls()
	if err != nil || calls["mps_quit"] != 5 {
		t.Errorf("calls: %v, %v", calls, err)
	}
}
