// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// An MPS server is a process among others, its clients are in a list of their
// own, and when the server is no more, nothing of it holds anything: at once, also
// for who had looked before.
func TestOwnedProcesses(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	lib := r.open()
	d := device(t, lib, 0)
	enable(t, d)
	gi := createAt(t, d, id3g, place(0, 4))
	ci := createCompute(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE)
	info := get(ci.GetInfo())(t, "GetInfo")
	owner := must.Get(state.Open(r.state()))(t)
	defer owner.Close()
	id := must.Get(owner.Own())(t)
	r.update(func(m *machine.Machine) {
		for i, kind := range []machine.ProcessKind{machine.MPSServer, machine.MPSClient, machine.MPSClient} {
			m.Processes = append(m.Processes, machine.Process{
				PID: 100 + i, Name: "mps", InstanceID: 1, MemoryBytes: miB, Kind: kind, Owner: id,
			})
		}
	})
	lists := func() (compute, clients []int, used uint64) {
		t.Helper()
		for _, l := range []struct {
			read func() ([]nvml.ProcessInfo, nvml.Return)
			into *[]int
		}{{info.Device.GetComputeRunningProcesses, &compute}, {info.Device.GetMPSComputeRunningProcesses, &clients}} {
			list := get(l.read())(t, "list processes")
			for _, p := range list {
				*l.into = append(*l.into, int(p.Pid))
			}
		}
		memory := get(info.Device.GetMemoryInfo())(t, "GetMemoryInfo")
		return compute, clients, memory.Used
	}
	compute, clients, used := lists()
	if !slices.Equal(compute, []int{100}) || !slices.Equal(clients, []int{101, 102}) || used != (45+3)*miB {
		t.Errorf("processes %v, clients %v, %d bytes used", compute, clients, used)
	}
	wants(t, "destroy a held compute instance", ci.Destroy(), nvml.ERROR_IN_USE)

	owner.Close()
	if compute, clients, used = lists(); len(compute)+len(clients) != 0 || used != 45*miB {
		t.Errorf("of a dead server: processes %v, clients %v, %d bytes used", compute, clients, used)
	}
	wants(t, "SystemGetProcessName of a dead one", code(lib.SystemGetProcessName(100)), nvml.ERROR_NOT_FOUND)
	wants(t, "destroy compute instance", ci.Destroy(), nvml.SUCCESS)
	wants(t, "destroy GPU instance", gi.Destroy(), nvml.SUCCESS)
}

// A process that only has device nodes open is in no list, and a partition that it has open stays. It is
// in the way of neither the MIG mode nor the first partition.
func TestOpenNodesOnly(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	lib := r.open()
	d := device(t, lib, 0)
	hold := func(instance, compute int) {
		r.update(func(m *machine.Machine) {
			m.Processes = []machine.Process{{PID: 100, Name: "dcgm", InstanceID: instance, ComputeID: compute, Kind: machine.Handle}}
		})
	}
	release := func() { r.update(func(m *machine.Machine) { m.Processes = nil }) }
	hold(-1, -1)
	enable(t, d)
	gi := createAt(t, d, id3g, place(0, 4))
	ci := createCompute(t, gi, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE)
	hold(1, 0)
	for name, list := range map[string]func() ([]nvml.ProcessInfo, nvml.Return){
		"compute": d.GetComputeRunningProcesses, "graphics": d.GetGraphicsRunningProcesses, "MPS": d.GetMPSComputeRunningProcesses,
	} {
		found := get(list())(t, name)
		expect.Len(t, found, 0, name, "processes")
	}
	wants(t, "destroy an open compute instance", ci.Destroy(), nvml.ERROR_IN_USE)
	release()
	wants(t, "destroy compute instance", ci.Destroy(), nvml.SUCCESS)
	wants(t, "destroy GPU instance", gi.Destroy(), nvml.SUCCESS)
}

// On a machine where minors move, a GPU has the lowest free one after its MIG mode has
// changed, with its files and nodes.
func TestMovingMinors(t *testing.T) {
	m := machineOf(h100(0))
	m.MovingMinors = true
	r := newRoot(t, m)
	d := device(t, r.open(), 0)
	for _, want := range []int{1, 0} {
		mode := nvml.DEVICE_MIG_ENABLE
		if want == 0 {
			mode = nvml.DEVICE_MIG_DISABLE
		}
		activation := get(d.SetMigMode(mode))(t, "SetMigMode")
		wants(t, "activation", activation, nvml.SUCCESS)
		minor := get(d.GetMinorNumber())(t, "GetMinorNumber")
		expect.Equal(t, minor, want, "minor")
	}
}
