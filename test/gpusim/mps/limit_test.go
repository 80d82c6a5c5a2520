// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func TestParseMemory(t *testing.T) {
	for text, want := range map[string]uint64{"1G": 1 << 30, "512M": 512 << 20, "80g": 80 << 30, "3m": 3 << 20} {
		expect.Equal(t, must.Get(parseMemory(text))(t), want, text)
	}
	for _, text := range []string{"", "G", "1", "1K", "0G", "-1G", "1.5G", "1GB", "99999999999G"} {
		if got, err := parseMemory(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
	// Seen on an H100.
	for mebibytes, want := range map[uint64]string{512: "512M", 1000: "1000M", 1023: "1023M", 1024: "1G", 1536: "1G", 2047: "1G", 5119: "4G", 10240: "10G", 20350: "19G"} {
		expect.Equal(t, formatMemory(mebibytes<<20), want, mebibytes, "MiB")
	}
}

func TestMemoryLimits(t *testing.T) {
	l := must.Get(parseLimits("0=1G,GPU-a=2G,1=3G,0=4G"))(t)
	expect.Same(t, l, memoryLimits{{"GPU-a", 2 << 30}, {"1", 3 << 30}, {"0", 4 << 30}})
	if got := l.of(0, "GPU-a"); got != 4<<30 {
		t.Errorf("the ordinal came last, but the limit is %d", got)
	}
	if got := l.with("GPU-a", 1<<30).of(0, "GPU-a"); got != 1<<30 {
		t.Errorf("the UUID came last, but the limit is %d", got)
	}
	expect.Equal(t, l.of(2, "GPU-b"), 0, "a limit for nothing")
	for _, text := range []string{"0", "0=", "0=1G,", "=;"} {
		if l, err := parseLimits(text); err == nil {
			t.Errorf("%q is %v", text, l)
		}
	}
}

func TestMaxContexts(t *testing.T) {
	whole := cuda.Device{Multiprocessors: 132, OfGPU: 132, Major: 9}
	part := cuda.Device{Multiprocessors: 16, OfGPU: 132, Major: 9}
	old := cuda.Device{Multiprocessors: 28, OfGPU: 28, Major: 6}
	for _, c := range []struct {
		d    cuda.Device
		cuda int
		want int
	}{{whole, 13000, 48}, {whole, 13010, 60}, {whole, 12040, 48}, {part, 13000, 5}, {part, 13010, 7}, {old, 13010, 16}} {
		expect.Equal(t, MaxContexts(c.d, c.cuda), c.want, c.d, "CUDA", c.cuda)
	}
}

// Defaults reach servers that start later, and per-server limits new clients.
func TestLimits(t *testing.T) {
	n := newNode(t, "dgx-h100", nil)
	n.env = []string{n.visible(2)}
	uuid := n.machine().GPUs[2].UUID
	n.daemon()
	first := n.server()
	n.gets(as{}, "memory: 81079 MiB, no limit\n  memory info: 80491 MiB free of 81079 MiB\n  multiprocessors: 132 of 132 (100 %)", 0, "info", "--free")
	n.tell("set_default_active_thread_percentage 25", "25.0")
	n.tell("set_default_device_pinned_mem_limit "+uuid+" 10240M", "")
	n.gets(as{}, "memory: 81079 MiB, no limit\n  memory info: 80491 MiB free of 81079 MiB\n  multiprocessors: 132 of 132 (100 %)", 0, "info", "--free")
	early := n.hold(as{}, "--memory", "20Gi").says("ready")

	n.tell("set_active_thread_percentage "+first+" 50", "50.0")
	n.tell("set_device_pinned_mem_limit "+first+" 0 17000M", "")
	n.tell("get_device_pinned_mem_limit "+first+" 0", "16G")
	if !n.logged("server.log", "Device pinned memory limit for device 0 set to 0x426800000 bytes") {
		t.Error("the server's log has no exact limit")
	}
	n.tell("set_device_pinned_mem_limit "+first+" 0 16G", "")
	n.gets(as{}, "limit 16384 MiB\n  memory info: 15870 MiB free of 81079 MiB\n  multiprocessors: 66 of 132 (50 %)", 0, "info", "--free")
	expect.Equal(t, early.stop(), 0, "the client from before has suffered")
	n.tell("shutdown_server "+first, "")
	n.server()
	n.gets(as{}, "limit 10240 MiB\n  memory info: 9726 MiB free of 81079 MiB\n  multiprocessors: 32 of 132 (25 %)", 0, "info", "--free")

	out, exit := n.client("alloc", "8Gi", "4Gi", "1534Mi", "1")
	if d := cmp.Diff("device 0: allocated 8192 MiB\n"+
		"device 0: CUDA_ERROR_OUT_OF_MEMORY: out of memory (4096 MiB wanted)\n"+
		"device 0: allocated 1534 MiB\n"+
		"device 0: CUDA_ERROR_OUT_OF_MEMORY: out of memory (0 MiB wanted)", out); d != "" || exit != 1 {
		t.Errorf("exit code %d: %s", exit, d)
	}
	// The server's limit is what its users cannot raise.
	for _, c := range []struct{ variable, want string }{
		{PercentageVariable + "=10", "12 of 132 (10 %)"},
		{PercentageVariable + "=100", "32 of 132 (25 %)"},
		{PercentageVariable + "=nonsense", "32 of 132 (25 %)"},
		{MemoryVariable + "=0=1G", "limit 1024 MiB"},
		{MemoryVariable + "=0=20G", "limit 10240 MiB"},
		{MemoryVariable + "=" + uuid + "=2G", "limit 2048 MiB"},
		{MemoryVariable + "=0=3G," + uuid + "=2G", "limit 2048 MiB"},
		// One name that is not known here is the end of all limits.
		{MemoryVariable + "=0=1G,1=1G", "no limit"},
		{MemoryVariable + "=0=1G," + n.machine().GPUs[3].UUID + "=1G", "no limit"},
		{MemoryVariable + "=0=1", "limit 10240 MiB"},
	} {
		n.gets(as{env: []string{c.variable}}, c.want, 0, "info")
	}
	n.tell("quit", "")
	n.daemon() // the defaults have died with the daemon
	n.server()
	n.gets(as{}, "no limit\n  memory info: 80491 MiB free of 81079 MiB\n  multiprocessors: 132 of 132", 0, "info", "--free")
}

// The daemon's own environment gives the first defaults.
func TestDefaultsFromTheEnvironment(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0), PercentageVariable+"=50", MemoryVariable+"=0=1G", PriorityVariable+"=1")
	n.tell("get_default_active_thread_percentage", "50.0")
	n.tell("get_default_device_pinned_mem_limit 0", "1G")
	n.tell("get_default_client_priority", "1")
	n.gets(as{}, "limit 1024 MiB", 0, "info")
	n.runs(belowNormal)
}

// Clients share what the GPU has, with each other and with programs that are not
// clients, and NVML shows who has how much.
func TestMemoryIsShared(t *testing.T) {
	n := newNode(t, "t4x1", nil)
	n.daemon()
	n.server()
	a := n.hold(as{}, "--memory", "8Gi").says("ready")
	n.gets(as{}, "CUDA_ERROR_OUT_OF_MEMORY", 1, "alloc", "8Gi")
	alone := n.hold(as{env: []string{PipeVariable + "=/nowhere"}}, "--memory", "2Gi").says("ready")
	n.gets(as{}, "CUDA_ERROR_OUT_OF_MEMORY", 1, "alloc", "5Gi")
	n.gets(as{}, "allocated 4096 MiB", 0, "alloc", "4Gi")

	const used = "Used                              : 10479 MiB" // and 107 MiB for each context
	n.eventually("the last one's memory is free", func() bool { return strings.Contains(n.smi("-q"), used) })
	q := n.smi("-q")
	for _, want := range []string{
		"Process ID                        : " + itoa(n.servers()[0]) + "\n            Type                          : C\n            Used GPU Memory               : 25 MiB",
		"Process ID                        : " + itoa(alone.Process.Pid) + "\n            Type                          : C\n            Used GPU Memory               : 2155 MiB",
		"Process ID                        : " + itoa(a.Process.Pid) + "\n            Type                          : M+C\n            Used GPU Memory               : 8299 MiB",
	} {
		expect.Contains(t, q, want, "nvidia-smi -q")
	}
	must.Do(t, a.Process.Kill())
	<-a.done
	n.eventually("the memory is free", func() bool { out, _ := n.client("alloc", "8Gi"); return strings.Contains(out, "allocated") })
}

const (
	partition = "MIG-00000000-0000-5000-8000-000000000009"
	other     = "MIG-00000000-0000-5000-8000-000000000007"
)

// divided puts two 1g.10gb on the first GPU.
func divided(m *machine.Machine) {
	g := m.GPUs[0].MIG
	g.Current, g.Pending = true, true
	for id, uuid := range map[int]string{9: partition, 7: other} {
		g.Instances = append(g.Instances, machine.GPUInstance{ID: id, ProfileID: 19, Placement: machine.Placement{Start: id - 7, Size: 1},
			Compute: []machine.ComputeInstance{{Placement: machine.Placement{Size: 1}, UUID: uuid}}})
	}
}

// A server on a MIG device holds it, and nothing else.
func TestPartition(t *testing.T) {
	n := newNode(t, "dgx-h100", divided)
	n.daemon(VisibleVariable + "=" + partition)
	n.tell("set_default_device_pinned_mem_limit 0 2G", "")
	n.server()
	n.gets(as{}, "NVIDIA H100 80GB HBM3 MIG 1g.10gb\n  UUID: "+partition+"\n  memory: 9969 MiB, limit 2048 MiB\n  memory info: 1722 MiB free of 9969 MiB\n  multiprocessors: 16 of 16", 0, "info", "--free")
	n.gets(as{}, "CUDA_ERROR_OUT_OF_MEMORY", 1, "alloc", "3Gi")
	direct := as{env: []string{PipeVariable + "=/nowhere", VisibleVariable + "=" + partition}}
	// No mode of a MIG device keeps programs out that are not clients.
	n.gets(direct, "allocated 1024 MiB", 0, "alloc", "1Gi")
	direct.env[1] = VisibleVariable + "=" + other
	n.gets(direct, "allocated 1024 MiB", 0, "alloc", "1Gi")
	expect.Contains(t, n.smi("mig", "-dci", "-gi", "9", "-i", "0"), "In use by another client", "destroy the compute instance")
	expect.Contains(t, n.smi("mig", "-dci", "-gi", "7", "-i", "0"), "Successfully destroyed", "destroy the other")
	n.kill(n.servers()[0])
	n.eventually("the server is gone from the machine", func() bool { return len(n.servers()) == 0 })
	expect.Contains(t, n.smi("mig", "-dci", "-gi", "9", "-i", "0"), "Successfully destroyed", "when the server is dead")
}

const (
	normal      = "runs: as a client of an MPS server"
	belowNormal = "runs: as a client of an MPS server, with priority 1 [BELOW NORMAL]"
)

// runs fails unless a program with these variables says so how it runs.
func (n *node) runs(want string, env ...string) {
	n.t.Helper()
	out, exit := n.run(n.clientCommand(as{env: env}, "info"))
	if exit != 0 || !strings.HasSuffix(strings.TrimSpace(out), want) {
		n.t.Errorf("with %q: exit code %d, %s, want %q", env, exit, out, want)
	}
}

// The daemon's priority is that of clients which come later, to servers that are there, too. A
// program can set its own, in either direction.
func TestClientPriority(t *testing.T) {
	n := newNode(t, "dgx-h100", nil)
	n.env = []string{n.visible(0)}
	n.daemon()
	server := n.server()
	n.tell("get_default_client_priority", "0")
	n.runs(normal)
	n.runs(belowNormal, PriorityVariable+"=1")

	n.tell("set_default_client_priority 1", "")
	n.tell("get_default_client_priority", "1")
	n.runs(belowNormal)
	n.runs(normal, PriorityVariable+"=0")
	n.runs(belowNormal, PriorityVariable+"=high")
	n.tell("get_server_list", server)

	n.tell("set_default_client_priority 2", `"2" is not a client priority: 0 [NORMAL] or 1 [BELOW NORMAL]`)
	n.tell("get_default_client_priority", "1")
	n.tell("quit", "")
	n.daemon() // the value has died with the daemon
	n.tell("get_default_client_priority", "0")
}

// A driver without the commands has nothing of it.
func TestNoClientPriority(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.change(func(m *machine.Machine) { m.MPS.NoPriorities = true })
	n.daemon(n.visible(0), PriorityVariable+"=1")
	for _, command := range []string{"get_default_client_priority", "set_default_client_priority"} {
		n.tell(command+" 1", "Unknown command: "+command)
	}
	n.runs(normal, PriorityVariable+"=1")
}
