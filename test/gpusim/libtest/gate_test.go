// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"os"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// held waits until a number of calls are held, and returns them.
func (r *root) held(n int) (calls []state.Held) {
	r.t.Helper()
	until(r.t, "calls that are held", func() bool {
		var err error
		if calls, err = r.file().Held(); err != nil {
			r.t.Fatal(err)
		}
		return len(calls) == n
	})
	return calls
}

func (r *root) letGo(fault, n int) {
	r.t.Helper()
	must.Do(r.t, r.file().LetGo(fault, n))
}

// TestGate: calls that a fault holds go on one by one, the oldest first, and those that come later are held, too.
func TestGate(t *testing.T) {
	r := newRoot(t, machineOf(h100(0), h100(1)))
	lib := r.open()
	first, second := device(t, lib, 0), device(t, lib, 1)
	id := r.strike(machine.Fault{Function: "*", GPU: 0, Hang: true, Effect: machine.Proceed})

	type answer struct {
		name string
		ret  nvml.Return
	}
	answers := make(chan answer, 3)
	ask := func(name string, call func() nvml.Return) { go func() { answers <- answer{name, call()} }() }
	ask("UUID", func() nvml.Return { _, ret := first.GetUUID(); return ret })
	r.held(1)
	ask("name", func() nvml.Return { _, ret := first.GetName(); return ret })
	r.held(2)
	ask("serial", func() nvml.Return { _, ret := first.GetSerial(); return ret })
	var functions []string
	for _, c := range r.held(3) {
		functions = append(functions, c.Function)
		if c.PID != os.Getpid() || c.Fault != id || !slices.Equal(c.GPUs, []int{0}) {
			t.Errorf("held: %+v", c)
		}
	}
	expect.Same(t, functions, []string{"nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetSerial"}, "held calls")
	wants(t, "on the other GPU", code(second.GetUUID()), nvml.SUCCESS)

	r.letGo(id, 1)
	expect.Equal(t, <-answers, (answer{"UUID", nvml.SUCCESS}), "what came first")
	r.held(2)
	ask("minor", func() nvml.Return { _, ret := first.GetMinorNumber(); return ret })
	r.held(3)
	r.letGo(id, 2)
	names := []string{(<-answers).name, (<-answers).name}
	slices.Sort(names)
	expect.Same(t, names, []string{"name", "serial"}, "then came")
	r.held(1)
	expect.Fails(t, r.file().LetGo(id, 2), "two calls were let go where there is one")
	r.relent(id)
	expect.Equal(t, <-answers, (answer{"minor", nvml.SUCCESS}), "what came last")
	r.held(0)
}

// TestGateAfter: the change is made, its answer is held, and the next call's change is made before it is let go.
func TestGateAfter(t *testing.T) {
	r := newRoot(t, divided(1))
	d := device(t, r.open(), 0)
	info := profileInfo(t, d, id1g)
	id := r.strike(machine.Fault{
		Function: "nvmlDeviceCreateGpuInstance", Hang: true, Effect: machine.FailAfter, Code: int(nvml.ERROR_TIMEOUT),
	})
	answers := make(chan nvml.Return, 2)
	for i := range 2 {
		go func() { _, ret := d.CreateGpuInstance(info); answers <- ret }()
		r.held(i + 1)
		expect.Equal(t, len(r.machine().GPUs[0].MIG.Instances), i+1, "instances")
	}
	for range 2 {
		r.letGo(id, 1)
		wants(t, "the call that was held", <-answers, nvml.ERROR_TIMEOUT)
	}
}

// TestGateOfTheDead: who is killed while its call is held leaves nothing behind.
func TestGateOfTheDead(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	lib := r.open()
	id := r.strike(machine.Fault{Function: "nvmlDeviceGetUUID", GPU: 0, Hang: true, Effect: machine.Proceed})
	for range 3 {
		other := helper(t, "list", library, "GPUSIM_STATE="+r.state())
		must.Do(t, other.Start())
		expect.Equal(t, r.held(1)[0].PID, other.Process.Pid, "the process that is held")
		_ = other.Process.Kill()
		_ = other.Wait()
		r.held(0)
	}
	d := device(t, lib, 0)
	call := hang(t, r, func() nvml.Return { _, ret := d.GetUUID(); return ret })
	r.held(1)
	r.letGo(id, 1)
	call.ends(nvml.SUCCESS)
}

// TestLockOfAllGPUs: as with a GSP that hangs, a call on one GPU keeps those of all waiting, and they go on one after the
// other; calls that concern no GPU do not wait.
func TestLockOfAllGPUs(t *testing.T) {
	r := newRoot(t, machineOf(h100(0), h100(1)))
	lib := r.open()
	first, second := device(t, lib, 0), device(t, lib, 1)
	id := r.strike(machine.Fault{Function: "*", GPU: 0, Hang: true, AllGPUs: true, Code: int(nvml.ERROR_TIMEOUT)})
	behind := func(n int) {
		t.Helper()
		until(t, "calls behind the one that is held", func() bool {
			calls, err := r.file().Behind()
			return err == nil && len(calls) == n
		})
	}
	ask := func(call func() (string, nvml.Return)) chan nvml.Return {
		answer := make(chan nvml.Return, 1)
		go func() { _, ret := call(); answer <- ret }()
		return answer
	}
	oldest := ask(first.GetUUID)
	r.held(1)
	next := ask(first.GetName)
	behind(1)
	other := ask(second.GetUUID)
	behind(2)
	wants(t, "a call on no GPU", code(lib.SystemGetDriverVersion()), nvml.SUCCESS)
	if calls := r.held(1); calls[0].Function != "nvmlDeviceGetUUID" {
		t.Errorf("held: %+v", calls)
	}
	select {
	case ret := <-other:
		t.Fatalf("the call on the other GPU has ended: %v", ret)
	default:
	}
	r.letGo(id, 1)
	wants(t, "the call that was held", <-oldest, nvml.ERROR_TIMEOUT)
	// The kernel decides which of the two is next.
	until(t, "the next call to be held", func() bool {
		calls, err := r.file().Held()
		return err == nil && len(calls) == 1 && calls[0].Function == "nvmlDeviceGetName"
	})
	r.letGo(id, 1)
	wants(t, "the next one", <-next, nvml.ERROR_TIMEOUT)
	wants(t, "the one on the other GPU", <-other, nvml.SUCCESS)
	behind(0)

	oldest = ask(first.GetUUID)
	r.held(1)
	other = ask(second.GetUUID)
	behind(1)
	r.relent(id)
	wants(t, "the call that was held", <-oldest, nvml.ERROR_TIMEOUT)
	wants(t, "the one on the other GPU", <-other, nvml.SUCCESS)
}
