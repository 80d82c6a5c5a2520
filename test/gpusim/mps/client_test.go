// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func itoa(n int) string { return strconv.Itoa(n) }

// The daemon's choice of GPUs is what programs number from 0.
func TestDevices(t *testing.T) {
	n := newNode(t, "dgx-h100", nil)
	gpus := n.machine().GPUs
	n.daemon(n.visible(5, 2))
	n.server()
	info := func(env ...string) string { out, _ := n.run(n.clientCommand(as{env: env}, "info")); return out }
	uuids := func(out string) (got []int) {
		for line := range strings.SplitSeq(out, "\n") {
			uuid, found := strings.CutPrefix(line, "  UUID: ")
			for i, g := range gpus {
				if found && g.UUID == uuid {
					got = append(got, i)
				}
			}
		}
		return got
	}
	for _, c := range []struct {
		visible string
		want    []int
	}{
		{"0,1", []int{5, 2}}, {"1", []int{2}}, {"1,0", []int{2, 5}}, {gpus[2].UUID, []int{2}},
		{gpus[2].UUID[:12] + "," + gpus[5].UUID, []int{2, 5}}, {"1,7,0", []int{2}},
	} {
		if got := uuids(info(VisibleVariable + "=" + c.visible)); len(got) != len(c.want) || got[0] != c.want[0] {
			t.Errorf("%s: GPUs %v, want %v", c.visible, got, c.want)
		}
	}
	if got := uuids(info()); len(got) != 2 || got[0] != 5 {
		t.Errorf("without a choice of its own: GPUs %v", got)
	}
	for _, visible := range []string{"2", gpus[0].UUID, ""} {
		n.gets(as{env: []string{VisibleVariable + "=" + visible}}, "CUDA_ERROR_NO_DEVICE", 1, "info")
	}
	// What a container has no node for is not there.
	must.Do(t, os.Remove(n.root+"/dev/nvidia"+itoa(gpus[5].Minor)))
	if got := uuids(info()); len(got) != 1 || got[0] != 2 {
		t.Errorf("without the node of GPU 5: GPUs %v", got)
	}
	n.gets(as{}, "CUDA_ERROR_INVALID_DEVICE", 1, "alloc", "--device", "1", "1Gi")
}

// A server that names a GPU that is not there starts and ends, and clients get
// nothing.
func TestUnknownDevices(t *testing.T) {
	for _, visible := range []string{"GPU-00000000-0000-0000-0000-000000000000", "MIG-nothing", "7", ""} {
		n := newNode(t, "l4x2", nil)
		n.daemon(VisibleVariable + "=" + visible)
		n.tell("start_server -uid 0", "")
		n.ends()
		if !n.logged("server.log", "MPS server failed to start: CUDA_ERROR_NO_DEVICE") {
			t.Errorf("%q: server.log does not say why", visible)
		}
		n.gets(as{}, "CUDA_ERROR_MPS_CONNECTION_FAILED", 1, "info")
		expect.Len(t, n.machine().Processes, 0, visible)
	}
}

// TestSharedMemory: the server's shared memory has no name, and programs need no folder of the server. Where the driver
// names it they need that.
func TestSharedMemory(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon()
	first := n.server()
	n.gets(as{}, "as a client of an MPS server", 0, "info", "--shm", t.TempDir())
	if left, err := filepath.Glob(filepath.Join(SharedMemory, "mps.shm.0."+first)); err != nil || len(left) != 0 {
		t.Errorf("a server without a name for its memory has %q, %v", left, err)
	}
	n.change(func(m *machine.Machine) { m.MPS.NamedSharedMemory = true })
	n.tell("shutdown_server "+first, "")
	n.server()
	n.gets(as{}, "CUDA_ERROR_MPS_CONNECTION_FAILED", 1, "info", "--shm", t.TempDir())
	n.gets(as{}, "as a client of an MPS server", 0, "info", "--shm", "/dev/shm")
	fake := t.TempDir()
	must.Do(t, os.WriteFile(fake+"/mps.shm.0."+itoa(n.servers()[0]), []byte("something else"), 0o600))
	n.gets(as{}, "CUDA_ERROR_MPS_CONNECTION_FAILED", 1, "info", "--shm", fake)
}

// Commands may need the daemon's /dev/shm, each connection anew. Nothing of that is left there.
func TestSharedMemoryForCommands(t *testing.T) {
	n := newNode(t, "l4x2", func(m *machine.Machine) { m.MPS.ControlNeedsSharedMemory = true })
	n.daemon()
	daemon := n.daemonPID()
	n.tell("get_server_list", "")
	n.server()
	elsewhere := n.command(as{env: []string{"PATH=/usr/bin:/bin"}}, "unshare", "--mount", "sh", "-c", `mount -t tmpfs none /dev/shm && exec "$0"`, n.controlProgram())
	elsewhere.Stdin = strings.NewReader("get_server_list\nget_default_client_priority\n")
	out, exit := n.run(elsewhere)
	if want := "Failed to open the control daemon's shared memory"; exit != 1 || out != want+"\n"+want {
		t.Errorf("with another /dev/shm: %q, exit code %d", out, exit)
	}
	n.eventually("it is counted", func() bool {
		calls, err := n.state.Calls()
		return err == nil && calls[CommandElsewhere] == 1
	})
	n.tell("quit", "")
	expect.Len(t, must.Get(filepath.Glob(filepath.Join(SharedMemory, "mps.control."+itoa(daemon)+".*")))(t), 0, "left")
}

// One server per user at a time: others wait until it has no clients.
func TestUsers(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon(n.visible(0))
	root := n.hold(as{}).says("ready")
	first := n.servers()[0]
	user := n.hold(as{uid: 1000})
	n.eventually("the user waits", func() bool { return n.logged("control.log", "from user 1000: Server is not ready") })
	late := n.hold(as{})
	n.gets(as{}, "no answer from the MPS control daemon in", 1, "info", "--timeout", "50ms")
	if user.text()+late.text() != "" {
		t.Errorf("they did not wait: %q, %q", user.text(), late.text())
	}
	root.stop()
	user.says("ready")
	second := n.servers()[0]
	if second == first || alive(first) {
		t.Errorf("server %d serves both users", first)
	}
	expect.Equal(t, late.text(), "", "who came later did not wait")
	user.stop()
	late.says("ready")
	if n.servers()[0] == second {
		t.Error("the user's server serves root")
	}
	// A server without clients gives way at once, however it was started.
	late.stop()
	n.tell("start_server -uid 1001", "")
	n.eventually("the server is another user's", func() bool {
		return n.logged("control.log", "for user 1001") && len(n.servers()) == 1
	})
	n.gets(as{uid: 1000}, "as a client of an MPS server", 0, "info")
}

func TestManyUsers(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemonWith(nil, "-d", "-multiuser-server")
	root, user := n.hold(as{}).says("ready"), n.hold(as{uid: 1000}).says("ready")
	n.gets(as{uid: 1001}, "as a client of an MPS server", 0, "info")
	if len(n.servers()) != 2 { // one server, two GPUs
		t.Errorf("servers: %v", n.servers())
	}
	root.stop()
	if !user.running() {
		t.Error("the other user's program has ended")
	}
	if out, exit := n.run(n.command(as{uid: 1000, env: []string{PipeVariable + "=/tmp/mps-nobody"}}, n.controlProgram(), "-d", "-multiuser-server")); exit != 1 ||
		!strings.Contains(out, "needs root") {
		t.Errorf("many users without root: %q, exit code %d", out, exit)
	}
}

// Without a daemon programs run as if MPS did not exist, unless the mode of the
// GPU forbids it.
func TestWithoutMPS(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.env = []string{n.visible(0)}
	n.gets(as{}, "memory: 22534 MiB, no limit\n  memory info: 22208 MiB free of 22534 MiB\n  multiprocessors: 58 of 58 (100 %)\n  runs: OUTSIDE OF MPS", 0, "info", "--free")
	n.gets(as{uid: 1000}, "allocated 20480 MiB", 0, "alloc", "20Gi")
	n.gets(as{}, "CUDA_ERROR_OUT_OF_MEMORY", 1, "alloc", "20Gi", "4Gi")
	n.gets(as{uid: 1000}, "CUDA_ERROR_OUT_OF_MEMORY", 1, "alloc", "20Gi", "4Gi")
	h := n.hold(as{}, "--memory", "20Gi").says("ready")
	n.gets(as{uid: 1000}, "CUDA_ERROR_OUT_OF_MEMORY", 1, "alloc", "20Gi")
	n.gets(as{}, "CUDA_ERROR_LAUNCH_FAILED", 1, "fault")
	if !h.running() {
		t.Error("a fault without MPS ended another program")
	}
	h.stop()

	n.change(func(m *machine.Machine) { m.GPUs[0].ComputeMode = cuda.ModeExclusiveProcess })
	n.gets(as{}, "runs: alone, the device is for one process", 0, "info")
	h = n.hold(as{}).says("ready")
	for _, uid := range []uint32{0, 1000} {
		n.gets(as{uid: uid}, "CUDA_ERROR_DEVICE_UNAVAILABLE", 1, "info")
	}
	// Nor can a server have it.
	n.daemon()
	n.gets(as{}, "CUDA_ERROR_MPS_CONNECTION_FAILED", 1, "info")
	h.stop()
	n.gets(as{}, "as a client of an MPS server", 0, "info")
	n.gets(as{env: []string{PipeVariable + "=/nowhere"}}, "CUDA_ERROR_DEVICE_UNAVAILABLE", 1, "info")
	n.tell("quit", "")

	n.change(func(m *machine.Machine) { m.GPUs[0].ComputeMode = cuda.ModeProhibited })
	n.gets(as{}, "CUDA_ERROR_DEVICE_UNAVAILABLE", 1, "info")
	n.daemon()
	n.gets(as{}, "CUDA_ERROR_MPS_CONNECTION_FAILED", 1, "info")
	n.change(func(m *machine.Machine) { m.GPUs[0].Failure = 15 })
	n.gets(as{}, "CUDA_ERROR_MPS_CONNECTION_FAILED", 1, "info")
}
