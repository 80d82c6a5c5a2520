// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

const noDaemon = "Cannot find MPS control daemon process"

func TestDaemonInBackground(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.replies("get_server_list", noDaemon, 1)
	n.daemon()
	if pid := n.daemonPID(); !alive(pid) || pid == os.Getpid() {
		t.Errorf("the daemon is process %d", pid)
	}
	for name, mode := range map[string]os.FileMode{
		controlSocket: os.ModeSocket | 0o666, privilegedSocket: os.ModeSocket | 0o755, logPipe: os.ModeNamedPipe | 0o777, pidFile: 0o666, lockFile: 0o666,
	} {
		if info, err := os.Lstat(filepath.Join(n.pipe, name)); err != nil || info.Mode() != mode {
			t.Errorf("%s: want mode %v, %v, %v", name, mode, info, err)
		}
	}
	n.tell("get_server_list", "")
	n.starts("An instance of this daemon is already running", 1)
	// A client that only checks for a listener does no harm.
	if c, err := net.Dial("unixpacket", filepath.Join(n.pipe, "control")); err != nil {
		t.Error(err)
	} else {
		_ = c.Close()
	}
	pid, daemon := n.server(), n.daemonPID()
	n.tell("quit", "")
	expect.Equal(t, len(n.servers()), 0, "quit has left the server")
	n.eventually("the daemon is gone", func() bool { return !alive(daemon) })
	for _, name := range []string{controlSocket, privilegedSocket, logPipe, pidFile} {
		if _, err := os.Stat(filepath.Join(n.pipe, name)); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
	for _, want := range []string{
		"Control " + fmt.Sprintf("%5d", daemon) + "] Starting control daemon using socket " + n.pipe + "/control",
		"Accepting connection...", "User did not send valid credentials", "NEW UI", "Cmd:quit",
		"Starting new server " + pid + " for user 0", "NEW SERVER " + pid + ": Ready", "Server " + pid + " exited with status 0", "Exit",
	} {
		if !n.logged("control.log", want) {
			t.Errorf("control.log has no %q", want)
		}
	}
	n.replies("get_server_list", noDaemon, 1)
	expect.Len(t, must.Get(filepath.Glob(filepath.Join(SharedMemory, "mps.shm.0."+pid)))(t), 0, "shared memory is left")
}

func TestDaemonInForeground(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	c := n.command(as{}, n.controlProgram(), "-f")
	var out strings.Builder
	c.Stderr = &out
	must.Do(t, c.Start())
	n.eventually("the daemon answers", func() bool { _, exit := n.control("get_server_list"); return exit == 0 })
	expect.Equal(t, n.daemonPID(), c.Process.Pid, "pid file")
	n.server()
	h := n.hold(as{}).says("ready")
	must.Do(t, c.Process.Signal(syscall.SIGTERM))
	expect.Do(t, c.Wait(), "end by a signal")
	expect.Equal(t, len(n.servers()), 0, "the server is left")
	h.says("CUDA_ERROR_MPS_RPC_FAILURE")
	expect.Contains(t, out.String(), "Starting control daemon using socket", "standard error")
}

// A daemon that was killed leaves its socket, which the next one takes over, and
// its server, which holds the GPU.
func TestDaemonIsKilled(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.env = []string{n.visible(0)}
	n.change(func(m *machine.Machine) { m.GPUs[0].ComputeMode = 3 })
	n.daemon()
	server := must.Get(strconv.Atoi(n.server()))(t)
	h := n.hold(as{}).says("ready")
	n.kill(n.daemonPID())
	n.replies("get_server_list", noDaemon, 1)
	if !h.running() || !alive(server) {
		t.Error("server and clients must not notice")
	}
	n.gets(as{}, "CUDA_ERROR_DEVICE_UNAVAILABLE", 1, "info")
	n.daemon()
	n.tell("start_server -uid 0", "")
	n.ends()
	if !n.logged("server.log", "MPS server failed to start") || !n.logged("control.log", "exited with status 1") {
		t.Error("the logs say nothing about the failed server")
	}
	n.kill(server)
	h.says("CUDA_ERROR_MPS_RPC_FAILURE")
	n.server()
	n.gets(as{}, "as a client of an MPS server", 0, "info")
}

func TestDaemonFolders(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.pipe = filepath.Join(n.pipe, strings.Repeat("x", 100))
	must.Do(t, os.MkdirAll(filepath.Dir(n.pipe), 0o755))
	n.starts(noDaemon, 1) // with a path that is too long
	if !n.logged("control.log", "Failed to bind") {
		t.Error("control.log does not say that the path is too long")
	}
	for args, want := range map[string]string{
		"-x": "Unrecognized option: -x", "-d -f": "usage:", "-multiuser-server": "usage:",
	} {
		if out, exit := n.run(n.command(as{}, n.controlProgram(), strings.Fields(args)...)); !strings.Contains(out, want) || exit != 1 {
			t.Errorf("%s: %q, exit code %d", args, out, exit)
		}
	}
	if out, exit := n.run(n.command(as{env: []string{PercentageVariable + "=200"}}, n.controlProgram(), "-d")); exit != 1 || !strings.Contains(out, "200") {
		t.Errorf("with a wrong percentage: %q, exit code %d", out, exit)
	}
}

func TestCommands(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.env = []string{n.visible(0, 1)}
	n.daemon()
	uuid := []string{n.machine().GPUs[0].UUID, n.machine().GPUs[1].UUID}
	pid := n.server()
	h := n.hold(as{}, "--device", "1").says("ready")
	client := strconv.Itoa(h.Process.Pid)
	for _, c := range []struct{ line, want string }{
		{"get_server_list", pid},
		{"get_server_status " + pid, "ACTIVE"},
		{"get_server_status 1", "Server 1 not found"},
		{"get_client_list " + pid, client},
		{"get_client_list", "Usage: get_client_list PID"},
		{"get_device_client_list", uuid[0] + ": " + client + "\n" + uuid[1] + ": " + client},
		{"get_device_client_list " + pid, uuid[0] + ": " + client + "\n" + uuid[1] + ": " + client},
		{"get_default_active_thread_percentage", "100.0"},
		{"set_default_active_thread_percentage 25", "25.0"},
		{"set_default_active_thread_percentage 12.5", "12.5"},
		{"set_default_active_thread_percentage 0", `"0" is not a percentage above 0 and up to 100`},
		{"set_default_active_thread_percentage 101", `"101" is not a percentage above 0 and up to 100`},
		{"get_default_active_thread_percentage", "12.5"},
		{"get_active_thread_percentage " + pid, "100.0"},
		{"set_active_thread_percentage " + pid + " 50", "50.0"},
		{"get_active_thread_percentage " + pid, "50.0"},
		{"set_active_thread_percentage 1 50", "Server 1 not found"},
		{"get_default_device_pinned_mem_limit 0", ""},
		{"set_default_device_pinned_mem_limit 0 4096M", ""},
		{"set_default_device_pinned_mem_limit no-such-GPU 1500M", ""},
		{"set_default_device_pinned_mem_limit 0 4096", `"4096" is not an amount of memory such as 2G or 512M`},
		{"get_default_device_pinned_mem_limit 0", "4G"},
		{"get_default_device_pinned_mem_limit " + uuid[0], ""},
		{"get_default_device_pinned_mem_limit no-such-GPU", "1G"},
		{"get_device_pinned_mem_limit " + pid + " 0", ""},
		{"set_device_pinned_mem_limit " + pid + " 0 2G", ""},
		{"get_device_pinned_mem_limit " + pid + " 0", "2G"},
		{"start_server -uid 0", ""}, // there is one
		{"get_server_list", pid},
		{"start_server 0", "Usage: start_server -uid UID"},
		{"terminate_client " + pid + " 1", "1"},
		{"shutdown_server 1", "Server 1 not found"},
		{"shutdown_server " + pid + " -x", "Usage: shutdown_server PID [-f]"},
		{"quit -t", "Usage: quit [-t TIMEOUT]"},
		{"quit -t soon", "Usage: quit [-t TIMEOUT]"},
		{"make_coffee", "Unknown command: make_coffee"},
		{"\n", ""},
		{"get_server_list\nget_default_active_thread_percentage", pid + "\n12.5"},
	} {
		n.tell(c.line, c.want)
	}
	ps, _ := n.control("ps -p " + pid)
	lines := strings.Split(ps, "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[0], "PID ") || !strings.HasPrefix(lines[1], client+" ") || !strings.HasSuffix(lines[2], "cuda-client") {
		t.Errorf("ps: %s", ps)
	}
	// Other users do not reach the socket for commands, and the one that they reach takes
	// none.
	if got, exit := n.controlAs(as{uid: 1000}, "get_server_list"); got != noDaemon || exit != 1 {
		t.Errorf("user 1000: %q, exit code %d", got, exit)
	}
	if got := n.send(controlSocket, `{"line":"set_default_active_thread_percentage 99"}`); strings.Contains(got, "99.0") {
		t.Errorf("the socket for programs answers %q", got)
	}
	n.tell("get_default_active_thread_percentage", "12.5")
	n.tell("terminate_client "+pid+" "+client, "0")
	h.says("CUDA_ERROR_MPS_CLIENT_TERMINATED")
	n.eventually("the client has gone", func() bool { out, _ := n.control("get_client_list " + pid); return out == "" })
	n.tell("get_server_status "+pid, "ACTIVE")
}

// send sends a packet to a socket and returns the answer.
func (n *node) send(socket, packet string) string {
	n.t.Helper()
	c := must.Get(net.Dial(network, filepath.Join(n.pipe, socket)))(n.t)
	defer c.Close()
	must.Get(c.Write([]byte(packet)))(n.t)
	answer := make([]byte, maxPacket)
	size, _ := c.Read(answer)
	return string(answer[:size])
}

// Whoever may write the FIFO writes the daemon's log.
func TestLogPipe(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon()
	const forged = "[Control  4711] Server 4712 exited with status 1"
	must.Do(t, os.WriteFile(filepath.Join(n.pipe, logPipe), []byte(forged+"\n"), 0))
	n.eventually("the line is in the log", func() bool { return n.logged("control.log", "\n"+forged+"\n") })
}

func TestShutdownServer(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon()
	pid := n.server()
	h := n.hold(as{}).says("ready")
	waiting := n.command(as{}, n.controlProgram())
	waiting.Stdin = strings.NewReader("shutdown_server " + pid + "\n")
	must.Do(t, waiting.Start())
	n.eventually("the server is asked", func() bool { return n.logged("control.log", "Server "+pid+" is asked to exit when its clients have") })
	next := n.hold(as{}) // comes too late for this server
	n.eventually("a client waits", func() bool { return n.logged("control.log", "push client to pending list") })
	if !h.running() || next.text() != "" {
		t.Errorf("the server did not wait for its client, or took another: %q", next.text())
	}
	expect.Equal(t, h.stop(), 0, "the client ended")
	expect.Do(t, waiting.Wait())
	next.says("ready")
	second, _ := n.control("get_server_list")
	if second == pid || second == "" {
		t.Errorf("server %q after %s", second, pid)
	}
	n.tell("shutdown_server "+second+" -f", "")
	next.says("CUDA_ERROR_MPS_RPC_FAILURE")
	n.tell("get_server_list", "")
}

func TestQuitWithClients(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon()
	n.server()
	h := n.hold(as{}).says("ready")
	n.tell("quit -t 0", "")
	h.says("CUDA_ERROR_MPS_RPC_FAILURE")
	expect.Equal(t, len(n.servers()), 0, "the server is left")
}

// With the machine, or what is left of it, everything ends.
func TestReboot(t *testing.T) {
	n := newNode(t, "l4x2", nil)
	n.daemon()
	n.server()
	h := n.hold(as{}).says("ready")
	daemon, server := n.daemonPID(), n.servers()[0]
	must.Do(t, sysroot.Reboot(n.root, sysroot.RebootOptions{}))
	n.eventually("daemon and server have ended", func() bool { return !alive(daemon) && !alive(server) })
	h.says("CUDA_ERROR_MPS_RPC_FAILURE")
	expect.Len(t, n.machine().Processes, 0, "processes are left")
	n.daemon()
	n.server()
	daemon, server = n.daemonPID(), n.servers()[0]
	must.Do(t, sysroot.Remove(n.root))
	n.eventually("daemon and server have ended", func() bool { return !alive(daemon) && !alive(server) })
}
