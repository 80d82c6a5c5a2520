// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/cgroup"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestMemoryLimits: what is set for a cgroup is what is read back, until the cgroup goes, and its processes count.
func TestMemoryLimits(t *testing.T) {
	m := machineOf(h100(0), h100(1))
	m.DriverVersion = "615.71.09"
	r := newRoot(t, m)
	lib := r.open()
	d, other := device(t, lib, 0), device(t, lib, 1)
	tree := cgroup.Mount(t)
	pod := cgroup.Make(t, tree, "pod")

	wants(t, "get before", code(d.GetMemoryLimits_v1(pod)), nvml.ERROR_NOT_FOUND)
	wants(t, "set", d.SetMemoryLimits_v1(pod, 512*miB, 1024*miB), nvml.SUCCESS)
	wants(t, "set again", d.SetMemoryLimits_v1(pod, 1024*miB, 2048*miB), nvml.SUCCESS)
	wants(t, "get on another GPU", code(other.GetMemoryLimits_v1(pod)), nvml.ERROR_NOT_FOUND)
	inside, outside := sleeper(t), sleeper(t)
	cgroup.Enter(t, pod, inside)
	r.update(func(m *machine.Machine) {
		for _, p := range []machine.Process{{PID: inside, GPU: 0}, {PID: inside, GPU: 1}, {PID: outside, GPU: 0}} {
			p.Name, p.InstanceID, p.ComputeID, p.MemoryBytes = "a", -1, -1, 300*miB
			m.Processes = append(m.Processes, p)
		}
	})
	got := get(d.GetMemoryLimits_v1(pod))(t, "get")
	if want := (nvml.MemoryLimits_v1{NameSpace: pod, SoftLimit: 1024 * miB, HardLimit: 2048 * miB, CurrentUsed: 300 * miB}); got != want {
		t.Errorf("limits %+v, want %+v", got, want)
	}
	expect.Equal(t, must.Get(r.file().MemoryLeft(0, inside))(t), (2048-300)*miB, "bytes are left to a process inside")
	if left, err := r.file().MemoryLeft(0, outside); err != nil || left <= 1<<62 {
		t.Errorf("%d bytes are left to a process outside: %v", left, err)
	}

	wants(t, "clear", d.SetMemoryLimits_v1(pod, 0, nvml.DEVICE_MEMORY_LIMIT_MAX), nvml.SUCCESS)
	wants(t, "get what was cleared", code(d.GetMemoryLimits_v1(pod)), nvml.ERROR_NOT_FOUND)
	next := cgroup.Make(t, tree, "next")
	wants(t, "set", d.SetMemoryLimits_v1(next, miB, miB), nvml.SUCCESS)
	cgroup.Remove(t, next)
	wants(t, "get without a cgroup", code(d.GetMemoryLimits_v1(next)), nvml.ERROR_OPERATING_SYSTEM)
	_, ret := d.GetMemoryLimits_v1(cgroup.Make(t, tree, "next"))
	wants(t, "get of a later cgroup of this name", ret, nvml.ERROR_NOT_FOUND)
}

func TestMemoryLimitsRefused(t *testing.T) {
	m := machineOf(h100(0))
	m.DriverVersion = "615.71.09"
	r := newRoot(t, m)
	d := device(t, r.open(), 0)
	pod := cgroup.Make(t, cgroup.Mount(t), "pod")
	for name, test := range map[string]struct {
		path       string
		soft, hard uint64
		want       nvml.Return
	}{
		"soft above hard":      {pod, 2, 1, nvml.ERROR_INVALID_ARGUMENT},
		"more than the memory": {pod, 0, 1 << 40, nvml.ERROR_INVALID_ARGUMENT},
		"no cgroup":            {filepath.Join(pod, "none"), 1, 1, nvml.ERROR_OPERATING_SYSTEM},
		"not a cgroup":         {t.TempDir(), 1, 1, nvml.ERROR_OPERATING_SYSTEM},
		"a file of a cgroup":   {filepath.Join(pod, "cgroup.procs"), 1, 1, nvml.ERROR_OPERATING_SYSTEM},
	} {
		wants(t, name, d.SetMemoryLimits_v1(test.path, test.soft, test.hard), test.want)
	}
	r.update(func(m *machine.Machine) { m.DriverVersion = "610.10.01" })
	wants(t, "set before driver 615", d.SetMemoryLimits_v1(pod, 1, 1), nvml.ERROR_NOT_SUPPORTED)
	r.update(func(m *machine.Machine) { m.DriverVersion = "615.71.09" })
	enable(t, d)
	wants(t, "set in MIG mode", d.SetMemoryLimits_v1(pod, 1, 1), nvml.ERROR_NOT_SUPPORTED)
}

// sleeper starts a process that does nothing, and returns its PID.
func sleeper(t *testing.T) int {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "infinity")
	cmd.Stderr = os.Stderr
	must.Do(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}
