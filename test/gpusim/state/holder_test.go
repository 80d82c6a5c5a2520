// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// holderVariable makes this test program a process that may only read the state at
// that path and holds something.
const holderVariable = "GPUSIM_TEST_HOLDER"

// holding is what it holds. With each line that it reads it has twice the memory.
var holding = []machine.Process{
	{GPU: 1, InstanceID: 13, ComputeID: 7, MemoryBytes: 3 << 20},
	{GPU: 0, InstanceID: -1, ComputeID: -1, Kind: machine.Handle},
}

func holdAsChild(t *testing.T, path string) {
	must.Do(t, syscall.Setuid(65534))
	f := must.Get(Open(path))(t)
	if _, err := f.Own(); err == nil {
		t.Fatal("it may write")
	}
	var held []*Holding
	for _, p := range holding {
		h := must.Get(f.Hold(p))(t)
		held = append(held, h)
	}
	first := holding[0]
	for lines := bufio.NewScanner(os.Stdin); ; {
		fmt.Println("holds")
		if !lines.Scan() {
			return
		}
		first.MemoryBytes *= 2
		must.Do(t, held[0].Change(first))
	}
}

// A process that may not write is in the list with its PID and what it holds, for all
// who look, until it is killed; and never in the file.
func TestHold(t *testing.T) {
	if path := os.Getenv(holderVariable); path != "" {
		holdAsChild(t, path)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, who then becomes somebody else")
	}
	m := full()
	m.Processes = []machine.Process{{PID: 1}}
	path, f := create(t, m)
	letIn(t, path)
	type child struct {
		*exec.Cmd
		in  io.WriteCloser
		out *bufio.Reader
	}
	var children []child
	await := func(c child) {
		t.Helper()
		if line, err := c.out.ReadString('\n'); err != nil || line != "holds\n" {
			t.Fatalf("child: %q, %v", line, err)
		}
	}
	for range 3 {
		c := child{Cmd: exec.Command(os.Args[0], "-test.run=^TestHold$")}
		c.Env = append(os.Environ(), holderVariable+"="+path)
		out, err := c.StdoutPipe()
		must.Do(t, err)
		c.in = must.Get(c.StdinPipe())(t)
		c.out = bufio.NewReader(out)
		must.Do(t, c.Start())
		t.Cleanup(func() { _ = c.Process.Kill() })
		await(c)
		children = append(children, c)
	}
	want := func(memory ...uint64) []machine.Process {
		all := []machine.Process{{PID: 1}}
		for i, c := range children {
			for _, p := range holding {
				if p.PID = c.Process.Pid; p.MemoryBytes > 0 {
					p.MemoryBytes = memory[i]
				}
				all = append(all, p)
			}
		}
		return all
	}
	seen := func(m *machine.Machine) []machine.Process {
		all := slices.Clone(m.Processes)
		for i := range all {
			if all[i].PID > 1 && all[i].Name == "" {
				t.Errorf("a process without a name: %+v", all[i])
			}
			all[i].Name, all[i].Owner = "", 0
		}
		return all
	}
	check := func(want []machine.Process) {
		t.Helper()
		order := func(a, b machine.Process) int { return (a.PID-b.PID)*2 - a.GPU + b.GPU }
		for range 2 {
			got := seen(snapshot(t, f))
			slices.SortFunc(got, order)
			slices.SortFunc(want, order)
			expect.Same(t, got, want)
			// A writer sees them, and does not make them stay.
			if err := f.Update(func(m *machine.Machine) error {
				expect.Equal(t, len(m.Processes), len(want), "a writer sees", m.Processes)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
	}
	check(want(3<<20, 3<<20, 3<<20))
	must.Get(io.WriteString(children[1].in, "\n"))(t)
	await(children[1])
	check(want(3<<20, 6<<20, 3<<20))
	must.Do(t, children[2].Process.Kill())
	_ = children[2].Wait()
	children = children[:2]
	check(want(3<<20, 6<<20))
	for _, c := range children {
		_ = c.in.Close()
		_ = c.Wait()
	}
	check([]machine.Process{{PID: 1}})
}

// Who opens the driver first initialises it, unless it stays loaded without anybody.
func TestOpenDriver(t *testing.T) {
	m := full()
	for i := range m.GPUs {
		m.GPUs[i].Persistence = i > 0
	}
	const takes = 20 * time.Millisecond
	m.Latencies = []machine.Latency{{Function: DriverOpen, Base: takes}}
	path, f := create(t, m)
	open := func(file *File) (took time.Duration) {
		t.Helper()
		began := time.Now()
		must.Do(t, file.OpenDriver())
		return time.Since(began)
	}
	change := func(change func(*machine.Machine)) {
		t.Helper()
		must.Do(t, f.Update(func(m *machine.Machine) error { change(m); return nil }))
	}
	first := must.Get(Open(path))(t)
	if took := open(first); took < takes {
		t.Errorf("the first took %s, want %s", took, takes)
	}
	// Longer than any test lasts.
	change(func(m *machine.Machine) { m.Latencies[0].Base = 24 * time.Hour })
	second := must.Get(Open(path))(t)
	asNobody(t, func() { open(second) })
	first.Close()
	third := must.Get(Open(path))(t)
	open(third)
	second.Close()
	third.Close()
	change(func(m *machine.Machine) { m.GPUs[0].Persistence = true })
	open(f)
}
