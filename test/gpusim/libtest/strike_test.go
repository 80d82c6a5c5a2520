// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// caller is a C program that calls functions by name.
type caller struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.WriteCloser
	out   *bufio.Reader
}

func newCaller(t *testing.T, r *root) *caller {
	t.Helper()
	program := filepath.Join(t.TempDir(), "strike")
	out, err := exec.CommandContext(t.Context(), "cc", "-std=gnu11", "-Wall", "-Wextra", "-o", program, "testdata/strike.c", "-ldl").CombinedOutput()
	must.Do(t, err, "compile", string(out))
	cmd := exec.CommandContext(t.Context(), program, library)
	cmd.Env = append(os.Environ(), "GPUSIM_STATE="+r.state())
	cmd.Stderr = os.Stderr
	stdin := must.Get(cmd.StdinPipe())(t)
	stdout := must.Get(cmd.StdoutPipe())(t)
	must.Do(t, cmd.Start())
	return &caller{t: t, cmd: cmd, stdin: stdin, out: bufio.NewReader(stdout)}
}

func (c *caller) stop() {
	c.t.Helper()
	_ = c.stdin.Close()
	expect.Do(c.t, c.cmd.Wait(), "the program")
}

// call calls a function with zeros for arguments.
func (c *caller) call(name string) (code int) {
	c.t.Helper()
	must.Get(fmt.Fprintln(c.stdin, name))(c.t)
	must.Do(c.t, expect.Err(fmt.Fscanln(c.out, &code)), "answer to", name)
	return code
}

// TestEveryFunction strikes all that the library exports, by name, so that a
// function that gets a model later is among them.
func TestEveryFunction(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	c := newCaller(t, r)
	defer c.stop()
	wants(t, "nvmlInit_v2", nvml.Return(c.call("nvmlInit_v2")), nvml.SUCCESS)
	functions := slices.DeleteFunc(symbols(t, library), func(name string) bool { return name == "nvmlErrorString" })
	const atOnce, firstCode = 32, 1000
	for names := range slices.Chunk(functions, atOnce) {
		r.update(func(m *machine.Machine) {
			m.Faults = nil
			for i, name := range names {
				m.Faults = append(m.Faults, machine.Fault{ID: i + 1, Function: name, GPU: -1, Code: firstCode + i})
			}
		})
		for i, name := range names {
			expect.Equal(t, c.call(name), firstCode+i, name)
		}
		r.update(func(m *machine.Machine) { m.Faults = nil })
	}
	want := map[string]uint64{"nvmlInit_v2": 1}
	for _, name := range functions {
		want[name]++
	}
	expect.Same(t, must.Get(r.file().Calls())(t), want, "calls counted")
	t.Logf("%d functions", len(functions))
}

// onGPU makes one call of each kind that is on a GPU in a certain way.
func onGPU(t *testing.T, lib nvml.Interface, r *root, gpu int) map[string]func() nvml.Return {
	t.Helper()
	d := device(t, lib, gpu)
	gi := createAt(t, d, id1g, place(0, 1))
	ci := createCompute(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE)
	mig := get(d.GetMigDeviceHandleByIndex(0))(t, "GetMigDeviceHandleByIndex")
	g := r.machine().GPUs[gpu]
	return map[string]func() nvml.Return{
		"UUID of the GPU":        func() nvml.Return { _, ret := d.GetUUID(); return ret },
		"UUID of its MIG device": func() nvml.Return { _, ret := mig.GetUUID(); return ret },
		"its MIG mode":           func() nvml.Return { _, _, ret := d.GetMigMode(); return ret },
		"its GPU instance":       func() nvml.Return { _, ret := gi.GetInfo(); return ret },
		"its compute instance":   func() nvml.Return { _, ret := ci.GetInfo(); return ret },
		"handle by UUID":         func() nvml.Return { _, ret := lib.DeviceGetHandleByUUID(g.UUID); return ret },
		"handle by MIG UUID": func() nvml.Return {
			_, ret := lib.DeviceGetHandleByUUID(g.MIG.Instances[0].Compute[0].UUID)
			return ret
		},
		"handle by serial":      func() nvml.Return { _, ret := lib.DeviceGetHandleBySerial(g.Serial); return ret },
		"handle by index":       func() nvml.Return { _, ret := lib.DeviceGetHandleByIndex(gpu); return ret },
		"handle by PCI address": func() nvml.Return { _, ret := lib.DeviceGetHandleByPciBusId(strings.ToUpper(g.PCIAddress)); return ret },
		"its index":             func() nvml.Return { _, ret := d.GetIndex(); return ret },
		"its PCI address":       func() nvml.Return { _, ret := d.GetPciInfo(); return ret },
		"count":                 func() nvml.Return { _, ret := lib.DeviceGetCount(); return ret },
	}
}

// TestGPUOfCalls: which calls a fault of one GPU strikes, and which fail when
// the GPU does.
func TestGPUOfCalls(t *testing.T) {
	r := newRoot(t, divided(2))
	lib := r.open()
	healthy, struck := onGPU(t, lib, r, 0), onGPU(t, lib, r, 1)
	works := map[string]bool{} // on a GPU that is lost
	for _, name := range []string{"handle by index", "handle by PCI address", "its index", "its PCI address", "count"} {
		works[name] = true
	}
	check := func(when string, calls map[string]func() nvml.Return, want func(name string) nvml.Return) {
		t.Helper()
		for name, call := range calls {
			expect.Equal(t, call(), want(name), when, name)
		}
	}
	success := func(string) nvml.Return { return nvml.SUCCESS }

	id := r.strike(machine.Fault{Function: "*", GPU: 1, Code: int(nvml.ERROR_UNKNOWN)})
	check("fault, other GPU", healthy, success)
	check("fault", struck, func(name string) nvml.Return {
		if name == "count" {
			return nvml.SUCCESS
		}
		return nvml.ERROR_UNKNOWN
	})
	r.wantCounts(fmt.Sprintf("%d/%d", len(struck)-1, len(struck)-1))

	r.update(func(m *machine.Machine) { m.GPUs[1].Failure = int(nvml.ERROR_RESET_REQUIRED) })
	wants(t, "fault on a GPU that fails", struck["UUID of the GPU"](), nvml.ERROR_UNKNOWN)
	r.relent(id)
	check("failure, other GPU", healthy, success)
	check("failure", struck, func(name string) nvml.Return {
		if works[name] {
			return nvml.SUCCESS
		}
		return nvml.ERROR_RESET_REQUIRED
	})

	r.update(func(m *machine.Machine) { m.GPUs[1].Failure = 0 })
	check("well again", struck, success)

	id = r.strike(machine.Fault{Function: "*", GPU: -1, Code: int(nvml.ERROR_MEMORY)})
	check("fault of any GPU", struck, func(string) nvml.Return { return nvml.ERROR_MEMORY })
	check("fault of any GPU", healthy, func(string) nvml.Return { return nvml.ERROR_MEMORY })
	r.relent(id) // nvmlShutdown would fail, too
}

// TestDestroyedHandle: what is gone is still on its GPU.
func TestDestroyedHandle(t *testing.T) {
	r := newRoot(t, divided(2))
	d := device(t, r.open(), 1)
	gi := createAt(t, d, id1g, place(0, 1))
	wants(t, "Destroy", gi.Destroy(), nvml.SUCCESS)
	r.strike(machine.Fault{Function: "nvmlGpuInstanceGetInfo", GPU: 1, Code: int(nvml.ERROR_UNKNOWN)})
	wants(t, "GetInfo of what is gone", code(gi.GetInfo()), nvml.ERROR_UNKNOWN)
}
