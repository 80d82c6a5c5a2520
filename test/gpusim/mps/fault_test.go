// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// A fatal fault ends all clients on the GPU. New ones are refused, on all GPUs,
// until those have gone.
func TestFault(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0, 1))
	pid := n.server()
	neighbour := n.hold(as{}, "--memory", "1Gi", "--stay").says("ready")
	far := n.hold(as{}, "--device", "1").says("ready")
	n.gets(as{}, "device 0: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", 1, "fault")
	neighbour.says("device 0: CUDA_ERROR_LAUNCH_FAILED")
	n.tell("get_server_status "+pid, "FAULT")
	n.gets(as{}, "CUDA_ERROR_MPS_SERVER_NOT_READY", 1, "info")
	n.gets(as{}, "CUDA_ERROR_MPS_SERVER_NOT_READY", 1, "alloc", "--device", "1", "1Gi")
	if !far.running() || strings.Contains(far.text(), "ERROR") {
		t.Error("the fault reached the other GPU")
	}
	expect.Equal(t, neighbour.stop(), 1, "a program whose work was ended must fail")
	n.becomes(pid, "ACTIVE")
	n.gets(as{}, "as a client of an MPS server", 0, "info")
	expect.Equal(t, far.stop(), 0, "the program on the other GPU has failed")
	self := n.hold(as{}, "--fault-after", "1ms").says("CUDA_ERROR_LAUNCH_FAILED")
	<-self.done
	n.becomes(pid, "ACTIVE")
}

// The same, wanted from outside.
func TestFaultFromOutside(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0, 1))
	pid := n.server()
	wanted := func() {
		n.change(func(m *machine.Machine) {
			for i := range m.Processes {
				m.Processes[i].Fault = m.Processes[i].Kind == machine.MPSServer && m.Processes[i].GPU == 1
			}
		})
		n.eventually("the fault has happened", func() bool {
			for _, p := range n.machine().Processes {
				if p.Fault {
					return false
				}
			}
			return true
		})
	}
	wanted() // no client is there to be hit
	n.tell("get_server_status "+pid, "ACTIVE")
	near, far := n.hold(as{}, "--device", "1", "--stay").says("ready"), n.hold(as{}).says("ready")
	wanted()
	near.says("CUDA_ERROR_LAUNCH_FAILED")
	n.tell("get_server_status "+pid, "FAULT")
	for _, p := range n.machine().Processes {
		expect.Equal(t, p.Status, machine.MPSFault, "status of process", p.PID)
	}
	near.stop()
	n.becomes(pid, "ACTIVE")
	expect.Equal(t, far.stop(), 0, "the fault reached the other GPU")
}

func TestServerIsKilled(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0))
	n.server()
	h := n.hold(as{}, "--memory", "4Gi").says("ready")
	n.kill(n.servers()[0])
	n.eventually("it is gone", func() bool {
		out, _ := n.control("get_server_list")
		return out == "" && len(n.machine().Processes) == 0
	})
	h.says("CUDA_ERROR_MPS_RPC_FAILURE")
	n.gets(as{}, "as a client of an MPS server", 0, "info") // of a new one
	expect.Len(t, n.servers(), 1, "servers")
}

func TestSlowServer(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0))
	id := n.fault(machine.Fault{Function: ServerStart, GPU: 0, Hang: true, Effect: machine.Proceed})
	n.tell("start_server -uid 0", "")
	pid, _ := n.control("get_server_list")
	n.tell("get_server_status "+pid, "INITIALIZING")
	h := n.hold(as{})
	n.eventually("the client waits", func() bool { return n.logged("control.log", "push client to pending list") })
	n.tell("get_server_status "+pid, "INITIALIZING")
	expect.Equal(t, len(n.servers()), 0, "servers that are active")
	n.change(func(m *machine.Machine) { state.RemoveFault(m, id) })
	h.says("ready")
	n.tell("get_server_status "+pid, "ACTIVE")
	h.stop()
	n.tell("quit", "")

	n.fault(machine.Fault{Function: ServerStart, GPU: -1, Hang: true, Effect: machine.Proceed})
	n.daemon(n.visible(0))
	n.tell("start_server -uid 0", "")
	n.tell("quit -t 0", "") // also of one that hangs
	n.change(func(m *machine.Machine) { m.Faults = nil })
	n.fault(machine.Fault{Function: ServerStart, GPU: -1, Delay: 200 * time.Millisecond, Effect: machine.Proceed})
	n.daemon(n.visible(0))
	begin := time.Now()
	n.gets(as{}, "as a client of an MPS server", 0, "info")
	if took := time.Since(begin); took < 200*time.Millisecond {
		t.Errorf("a server with a delay of 200 ms has started in %v", took)
	}
}

func TestFaultsOfServers(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0))
	n.fault(machine.Fault{Function: ServerStart, GPU: 1, Effect: machine.Fail}) // another GPU's
	n.fault(machine.Fault{Function: ServerStart, GPU: 0, Times: 1, Effect: machine.Fail})
	n.fault(machine.Fault{Function: ServerStart, GPU: -1, Skip: 1, Times: 1, Effect: machine.KillBefore})
	killed := n.fault(machine.Fault{Function: ServerStart, GPU: -1, Skip: 2, Times: 1, Hang: true, Effect: machine.KillAfter})
	for range 2 {
		n.gets(as{}, "CUDA_ERROR_MPS_CONNECTION_FAILED", 1, "info")
	}
	// The third is killed after it has become ready. Its client comes before that: one that the
	// daemon cannot hand over any more gets the next server.
	h := n.hold(as{}).says("ready")
	n.change(func(m *machine.Machine) { state.RemoveFault(m, killed) })
	h.says("CUDA_ERROR_MPS_RPC_FAILURE")
	n.ends()
	n.gets(as{}, "as a client of an MPS server", 0, "info")

	n.fault(machine.Fault{Function: ClientConnect, GPU: 0, Times: 1, Effect: machine.Fail})
	n.gets(as{}, "CUDA_ERROR_MPS_CONNECTION_FAILED", 1, "info")
	n.fault(machine.Fault{Function: ClientAlloc, GPU: 0, Times: 1, Effect: machine.Fail})
	n.gets(as{}, "CUDA_ERROR_OUT_OF_MEMORY: out of memory (1024 MiB wanted)\ndevice 0: allocated 1024 MiB", 1, "alloc", "1Gi", "1Gi")
	n.fault(machine.Fault{Function: ClientAlloc, GPU: 0, Times: 1, Effect: machine.KillBefore})
	n.gets(as{}, "CUDA_ERROR_MPS_RPC_FAILURE", 1, "alloc", "1Gi")
	n.ends()
	n.gets(as{}, "allocated 1024 MiB", 0, "alloc", "1Gi")
}

func TestFaultsOfDaemons(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.env = []string{n.visible(0)}
	n.fault(machine.Fault{Function: ControlStart, GPU: 0, Times: 1, Effect: machine.Fail})
	n.starts("MPS control daemon failed to start", 1)
	n.fault(machine.Fault{Function: ControlStart, GPU: 0, Times: 1, Effect: machine.KillBefore})
	n.fault(machine.Fault{Function: ControlStart, GPU: 0, Skip: 1, Times: 1, Effect: machine.KillAfter})
	for range 2 {
		n.starts("MPS control daemon ended during its start", 1)
	}
	n.fault(machine.Fault{Function: ControlStart, GPU: 0, Times: 1, Effect: machine.Pretend})
	n.starts("", 0)
	n.replies("get_server_list", noDaemon, 1)
	begin := time.Now()
	n.fault(machine.Fault{Function: ControlStart, GPU: 0, Times: 1, Delay: 100 * time.Millisecond, Effect: machine.Proceed})
	n.starts("", 0)
	if took := time.Since(begin); took < 100*time.Millisecond {
		t.Errorf("a daemon with a delay of 100 ms has started in %v", took)
	}

	set, get := "set_default_active_thread_percentage", "get_default_active_thread_percentage"
	n.fault(machine.Fault{Function: state.MPS + set, GPU: -1, Times: 1, Effect: machine.Fail})
	n.replies(set+" 10", "Failed to execute "+set, 1)
	n.tell(get, "100.0")
	n.fault(machine.Fault{Function: state.MPS + set, GPU: -1, Times: 1, Effect: machine.Pretend})
	n.tell(set+" 10", "")
	n.tell(get, "100.0")
	n.fault(machine.Fault{Function: state.MPS + set, GPU: -1, Times: 1, Effect: machine.FailAfter})
	if _, exit := n.control(set + " 10"); exit != 1 {
		t.Errorf("exit code %d", exit)
	}
	n.tell(get, "10.0")

	id := n.fault(machine.Fault{Function: state.MPS + get, GPU: -1, Hang: true, Effect: machine.Proceed})
	c := n.command(as{}, n.controlProgram())
	c.Stdin = strings.NewReader(get + "\n")
	var out strings.Builder
	c.Stdout = &out
	must.Do(t, c.Start())
	n.eventually("the command hangs", func() bool { return n.logged("control.log", "Cmd:"+get) && n.machine().Faults[8].Struck > 0 })
	n.tell("get_server_list", "") // others go on
	n.change(func(m *machine.Machine) { state.RemoveFault(m, id) })
	if err := c.Wait(); err != nil || out.String() != "10.0\n" {
		t.Errorf("after the fault is removed: %q, %v", out.String(), err)
	}
	n.server()
	n.fault(machine.Fault{Function: state.MPS + "quit", GPU: -1, Times: 1, Effect: machine.KillBefore})
	if _, exit := n.control("quit"); exit != 1 {
		t.Errorf("the daemon dies at quit: exit code %d", exit)
	}
	expect.Equal(t, len(n.servers()), 1, "the server has died with the daemon")
}
