// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// A device has room for that many contexts, of however many processes. Being connected
// counts for nothing.
func TestContexts(t *testing.T) {
	n := newNode(t, "dgx-h100", divided)
	n.env = []string{VisibleVariable + "=" + partition}
	n.daemon()
	n.server()
	many := n.hold(as{}, "--contexts", "4").says("ready")
	last := n.hold(as{}).says("ready")
	n.gets(as{}, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", 1, "info")
	n.gets(as{}, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", 1, "hold", "--contexts", "2")
	last.stop()
	n.eventually("there is room for one", func() bool { _, exit := n.client("info"); return exit == 0 })
	n.gets(as{}, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", 1, "hold", "--contexts", "2")
	many.stop()
}

// Each context takes memory, which counts against the limit of its client, and the
// server takes some, too.
func TestMemoryOfContexts(t *testing.T) {
	n := newNode(t, "dgx-h100", divided)
	n.env = []string{VisibleVariable + "=" + partition}
	n.daemon()
	pid := n.server()
	if got := n.machine().Processes[0].MemoryBytes; got != 74<<20 {
		t.Errorf("the server takes %d bytes", got)
	}
	h := n.hold(as{}, "--contexts", "2", "--memory", "1Gi").says("ready")
	if p := n.machine().Processes[1]; p.Kind != machine.MPSClient || p.MemoryBytes != (1024+2*326)<<20 {
		t.Errorf("the client's entry: %+v", p)
	}
	// Of 9969: 74 of the server, 2·326 + 1024 of the first client, 326 of this one.
	n.gets(as{}, "memory info: 7893 MiB free of 9969 MiB", 0, "info", "--free")
	h.stop()

	n.tell("set_device_pinned_mem_limit "+pid+" 0 1000M", "")
	n.gets(as{}, "memory info: 674 MiB free of 9969 MiB", 0, "info", "--free")
	n.gets(as{}, "allocated 674 MiB", 0, "alloc", "674Mi")
	n.gets(as{}, "CUDA_ERROR_OUT_OF_MEMORY", 1, "alloc", "675Mi")
	n.tell("set_device_pinned_mem_limit "+pid+" 0 300M", "")
	n.gets(as{}, "CUDA_ERROR_OUT_OF_MEMORY", 1, "info") // no room for a context
}

// A client that is killed while it has work on the GPU leaves a server on which all
// fails, and which does not show it.
func TestKilledClient(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0))
	pid := n.server()
	other := n.hold(as{}, "--stay").says("ready")

	idle := n.hold(as{}).says("ready")
	n.kill(idle.Process.Pid)
	polite := n.hold(as{}, "--busy").says("ready")
	expect.Equal(t, polite.stop(), 0, "a program that synchronises at its end has failed")
	n.gets(as{}, "as a client of an MPS server", 0, "info")

	deaf := n.hold(as{}, "--busy", "--ignore-sigterm").says("ready")
	n.kill(deaf.Process.Pid)
	other.says("device 0: CUDA_ERROR_UNKNOWN")
	n.gets(as{}, "CUDA_ERROR_UNKNOWN", 1, "info")
	n.tell("get_server_status "+pid, "ACTIVE")
	other.stop()
	n.gets(as{}, "CUDA_ERROR_UNKNOWN", 1, "info") // not even without clients does it recover
	n.tell("shutdown_server "+pid+" -f", "")
	n.gets(as{}, "as a client of an MPS server", 0, "info")

	n.change(func(m *machine.Machine) { m.MPS.HarmlessKills = true })
	other, deaf = n.hold(as{}).says("ready"), n.hold(as{}, "--busy").says("ready")
	n.kill(deaf.Process.Pid)
	n.gets(as{}, "as a client of an MPS server", 0, "info")
	expect.Equal(t, other.stop(), 0, "the other client has failed")
}

// A client that is terminated first can be killed.
func TestTerminateClient(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0))
	pid := n.server()
	other := n.hold(as{}).says("ready")
	busy := n.hold(as{}, "--busy", "--stay", "--ignore-sigterm", "--memory", "1Gi", "--contexts", "2").says("ready")
	client := itoa(busy.Process.Pid)
	n.tell("terminate_client "+pid+" "+client, "0")
	busy.says("device 0: CUDA_ERROR_MPS_CLIENT_TERMINATED")
	for _, context := range []string{"1", "2"} {
		if line := "Volta MPS: status of client {" + client + ", " + context + "} is INACTIVE"; !n.logged("server.log", line) {
			t.Errorf("server.log has no %q", line)
		}
	}
	if len(n.machine().Processes) != 2 { // the server and the other
		t.Errorf("it still has memory: %v", n.machine().Processes)
	}
	if !busy.running() {
		t.Error("the process was ended, too")
	}
	n.tell("terminate_client "+pid+" "+client, "0") // again
	n.kill(busy.Process.Pid)
	n.gets(as{}, "as a client of an MPS server", 0, "info")
	expect.Equal(t, other.stop(), 0, "the other client has failed")
	n.eventually("the server has noticed its end", func() bool { out, _ := n.control("terminate_client " + pid + " " + client); return out == "1" })
	if out, exit := n.control("terminate_client 1 " + client); !strings.Contains(out, "not found") || exit != 0 {
		t.Errorf("a server that is not there: %q, exit code %d", out, exit)
	}
}

// A daemon that may not open as many files as NVIDIA asks for has servers that fail
// when they have some contexts.
func TestOpenFiles(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	limited := func() {
		t.Helper()
		c := n.command(as{env: []string{n.visible(0)}}, "/bin/sh", "-c", `ulimit -S -n 1024; exec "$0" -d`, n.controlProgram())
		if out, exit := n.run(c); exit != 0 || out != "" {
			t.Fatalf("start a daemon: %q, exit code %d", out, exit)
		}
		n.server()
	}
	limited()
	three := n.hold(as{}, "--contexts", "3").says("ready")
	n.gets(as{}, "CUDA_ERROR_OUT_OF_MEMORY", 1, "info")
	if !n.logged("server.log", "MPS Server failed to create/open SHM segment.") {
		t.Error("the server's log does not say why")
	}
	n.change(func(m *machine.Machine) { m.MPS.FewFiles = true })
	n.gets(as{}, "as a client of an MPS server", 0, "info")
	three.stop()
}

// Without persistence mode a server's start includes the initialisation of the driver.
func TestInitialization(t *testing.T) {
	m := &machine.Machine{GPUs: []machine.GPU{{}, {Persistence: true}, {}}}
	devices := []cuda.Device{{GPU: 0}, {GPU: 1}, {GPU: 2}}
	expect.Equal(t, initialization(m, devices), 0, "without a latency it takes")
	m.Latencies = []machine.Latency{{Function: ServerStart, Base: time.Second}}
	expect.Equal(t, initialization(m, devices), 2*time.Second, "two GPUs without persistence take")

	n := newNode(t, "l4x2", func(m *machine.Machine) {
		m.Latencies = []machine.Latency{{Function: ServerStart, Base: time.Hour}}
	})
	n.daemon(n.visible(0))
	n.tell("start_server -uid 0", "")
	pid, _ := n.control("get_server_list")
	n.tell("get_server_status "+pid, "INITIALIZING")
	n.tell("quit -t 0", "")
	n.change(func(m *machine.Machine) { m.GPUs[0].Persistence = true })
	n.daemon(n.visible(0))
	n.server()
}

// busy is the utilisation of a program by its PID, as others see it; -1: it is not there.
func (n *node) busy(h *holder) int {
	n.t.Helper()
	for _, p := range n.machine().Processes {
		if p.PID == h.Process.Pid && p.Kind != machine.MPSServer {
			return p.SM
		}
	}
	return -1
}

// Programs that have a kernel on the device are busy, also those that may not write the
// state, and clients of MPS with as much as they may use.
func TestBusyPrograms(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.env = []string{n.visible(0)}
	for _, test := range []struct {
		who  as
		args []string
		want int
	}{
		{as{}, nil, 0}, {as{}, []string{"--busy"}, 100}, {as{}, []string{"--busy", "--sm", "40"}, 40},
		{as{uid: 1000}, nil, 0}, {as{uid: 1000}, []string{"--busy", "--sm", "40"}, 40},
	} {
		h := n.hold(test.who, test.args...).says("ready")
		if sm := n.busy(h); sm != test.want {
			t.Errorf("user %d, %v: %d %% busy, want %d %%", test.who.uid, test.args, sm, test.want)
		}
		h.stop()
	}
	n.daemon()
	h := n.hold(as{env: []string{PercentageVariable + "=25"}}, "--busy").says("ready")
	idle := n.hold(as{}).says("ready")
	if sm, none := n.busy(h), n.busy(idle); sm != 25 || none != 0 {
		t.Errorf("clients of MPS: %d %% and %d %% busy", sm, none)
	}
	h.stop()
	idle.stop()
}
