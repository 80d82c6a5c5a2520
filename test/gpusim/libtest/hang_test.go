// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"os"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// hung is a call that hangs in a thread of its own.
type hung struct {
	t    *testing.T
	done chan nvml.Return
}

// hang starts a call and waits until the fault has struck it.
func hang(t *testing.T, r *root, call func() nvml.Return) *hung {
	t.Helper()
	struck := func() (n uint64) {
		for _, f := range r.machine().Faults {
			n += f.Struck
		}
		return n
	}
	before := struck()
	h := &hung{t: t, done: make(chan nvml.Return, 1)}
	go func() { h.done <- call() }()
	until(t, "the strike", func() bool { return struck() > before })
	return h
}

func (h *hung) hangs() {
	h.t.Helper()
	select {
	case ret := <-h.done:
		h.t.Fatalf("the call is over: %v", ret)
	default:
	}
}

func (h *hung) ends(want nvml.Return) {
	h.t.Helper()
	wants(h.t, "the call that hung", <-h.done, want)
}

// TestHang: one GPU's call hangs; the other GPU, and other calls of this one,
// work, changes among them.
func TestHang(t *testing.T) {
	r := newRoot(t, divided(2))
	lib := r.open()
	first, second := device(t, lib, 0), device(t, lib, 1)
	info := profileInfo(t, first, id1g)
	id := r.strike(machine.Fault{Function: "nvmlDeviceCreateGpuInstance", GPU: 0, Hang: true, Effect: machine.Proceed})
	call := hang(t, r, func() nvml.Return {
		_, ret := first.CreateGpuInstance(info)
		return ret
	})
	expect.Do(t, fill(second, nvml.GPU_INSTANCE_PROFILE_1_SLICE), "on the other GPU")
	createAt(t, first, id2g, place(4, 2))
	r.update(func(m *machine.Machine) { m.Name = "changed" })
	call.hangs()
	expect.Equal(t, len(r.machine().GPUs[0].MIG.Instances), 1, "instances on the GPU of the call that hangs")
	r.relent(id)
	call.ends(nvml.SUCCESS)
	expect.Equal(t, len(r.machine().GPUs[0].MIG.Instances), 2, "instances when the call is over")
}

// TestHangAfter: the change is there, the answer is not.
func TestHangAfter(t *testing.T) {
	r := newRoot(t, divided(1))
	d := device(t, r.open(), 0)
	info := profileInfo(t, d, id1g)
	id := r.strike(machine.Fault{
		Function: "nvmlDeviceCreateGpuInstance", Hang: true, Effect: machine.FailAfter, Code: int(nvml.ERROR_TIMEOUT),
	})
	call := hang(t, r, func() nvml.Return {
		_, ret := d.CreateGpuInstance(info)
		return ret
	})
	until(t, "the change", func() bool { return len(r.machine().GPUs[0].MIG.Instances) == 1 })
	call.hangs()
	r.relent(id)
	call.ends(nvml.ERROR_TIMEOUT)
}

// TestHangEnds: what else than the removal of the fault ends it, and what does
// not.
func TestHangEnds(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(r *root, lib nvml.Interface, id int)
		want nvml.Return
	}{
		"fault changed": {func(r *root, _ nvml.Interface, _ int) {
			r.update(func(m *machine.Machine) { m.Faults[0].Hang = false })
		}, nvml.SUCCESS},
		"fault in its place": {func(r *root, _ nvml.Interface, id int) {
			r.relent(id)
			r.strike(machine.Fault{Function: "nvmlDeviceGetUUID", Hang: true, Effect: machine.Proceed})
		}, nvml.SUCCESS},
		"GPU lost meanwhile": {func(r *root, _ nvml.Interface, id int) {
			r.update(func(m *machine.Machine) { m.GPUs[0].Failure = int(nvml.ERROR_GPU_IS_LOST) })
			r.relent(id)
		}, nvml.ERROR_GPU_IS_LOST},
		"state file gone": {func(r *root, _ nvml.Interface, _ int) {
			expect.Do(r.t, os.Remove(r.state()))
		}, nvml.SUCCESS},
		"library shut down": {func(r *root, lib nvml.Interface, id int) {
			wants(r.t, "Shutdown", lib.Shutdown(), nvml.SUCCESS)
			r.relent(id)
		}, nvml.ERROR_UNINITIALIZED},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t, machineOf(h100(0)))
			lib := r.open()
			d := device(t, lib, 0)
			id := r.strike(machine.Fault{Function: "nvmlDeviceGetUUID", Hang: true, Effect: machine.Proceed})
			call := hang(t, r, func() nvml.Return {
				_, ret := d.GetUUID()
				return ret
			})
			call.hangs()
			c.end(r, lib, id)
			call.ends(c.want)
		})
	}
}

// TestInitIsStruck: nvmlInit has no state open yet, and is struck all the same.
func TestInitIsStruck(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	t.Setenv("GPUSIM_STATE", r.state())
	r.strike(machine.Fault{Function: "nvmlInit_v2", GPU: -1, Code: int(nvml.ERROR_DRIVER_NOT_LOADED), Skip: 1, Times: 1})
	r.strike(machine.Fault{Function: "nvmlInitWithFlags", GPU: -1, Code: int(nvml.ERROR_NO_PERMISSION)})
	lib := nvml.New(nvml.WithLibraryPath(library))
	for i, want := range []nvml.Return{nvml.SUCCESS, nvml.ERROR_DRIVER_NOT_LOADED, nvml.SUCCESS} {
		if got := lib.Init(); got != want {
			t.Fatalf("init %d: %v, want %v", i, got, want)
		}
		if want == nvml.SUCCESS {
			wants(t, "Shutdown", lib.Shutdown(), nvml.SUCCESS)
		}
	}
	wants(t, "InitWithFlags", lib.InitWithFlags(0), nvml.ERROR_NO_PERMISSION)
	r.wantCounts("3/1 1/1")
}

// TestInitHangs: another thread that has initialised the library goes on.
func TestInitHangs(t *testing.T) {
	r, d := oneH100(t)
	id := r.strike(machine.Fault{Function: "nvmlInit_v2", GPU: -1, Hang: true, Effect: machine.Fail, Code: int(nvml.ERROR_UNKNOWN)})
	call := hang(t, r, nvml.New(nvml.WithLibraryPath(library)).Init)
	wants(t, "another thread", code(d.GetUUID()), nvml.SUCCESS)
	call.hangs()
	r.relent(id)
	call.ends(nvml.ERROR_UNKNOWN)
}
