// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/libtest"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

var built libtest.Node

func TestMain(m *testing.M) {
	// What the programs inherit is enough for MPS, wherever the tests run.
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err == nil {
		files.Cur, files.Max = max(enoughFiles, files.Cur), max(enoughFiles, files.Max)
		err = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &files)
		if err != nil {
			fmt.Fprintln(os.Stderr, "raise the limit of open files:", err)
		}
	}
	code := m.Run()
	built.Remove()
	os.Exit(code)
}

func build(t *testing.T) (dir string) {
	t.Helper()
	return built.Dir(t, "../cmd/nvidia-smi", "../cmd/nvidia-cuda-mps-control", "../cmd/nvidia-cuda-mps-server", "../cmd/cuda-client")
}

// node is a simulated machine, with the folders of one MPS daemon.
type node struct {
	t         *testing.T
	root      string
	pipe, log string
	state     *state.File
	env       []string // of daemons and clients, as well
}

func newNode(t *testing.T, name string, prepare func(*machine.Machine)) *node {
	t.Helper()
	m := must.Get(catalog.Machine(name, catalog.Options{}))(t)
	if prepare != nil {
		prepare(m)
	}
	a := must.Get(sysroot.AssetsIn(build(t)))(t)
	// Not t.TempDir: a socket's path must be short, and other users come here.
	dir := must.Get(os.MkdirTemp("", "mps"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // which also ends daemons and servers
	n := &node{t: t, root: filepath.Join(dir, "root"), pipe: filepath.Join(dir, "pipe"), log: filepath.Join(dir, "log")}
	if err := errors.Join(os.Chmod(dir, 0o755), sysroot.Create(n.root, m, a)); errors.Is(err, unix.EPERM) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	n.state = must.Get(state.Open(sysroot.StatePath(n.root)))(t)
	t.Cleanup(n.state.Close)
	t.Cleanup(n.killAll)
	return n
}

// killAll ends what a test left, and removes what servers leave that are killed.
func (n *node) killAll() {
	defer func() {
		data, _ := os.ReadFile(filepath.Join(n.log, "server.log"))
		for line := range strings.Lines(string(data)) {
			if _, name, found := strings.Cut(line, "] Created anonymous shared memory region "); found {
				_ = os.Remove(filepath.Join(SharedMemory, strings.TrimSpace(name)))
			}
		}
	}()
	if pid := n.daemonPID(); pid > 0 {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	for _, pid := range n.servers() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

func (n *node) daemonPID() int {
	text, err := os.ReadFile(filepath.Join(n.pipe, pidFile))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	expect.Do(n.t, err)
	return pid
}

func (n *node) machine() *machine.Machine {
	n.t.Helper()
	return must.Get(n.state.Snapshot())(n.t)
}

func (n *node) change(f func(*machine.Machine)) {
	n.t.Helper()
	must.Do(n.t, n.state.Update(func(m *machine.Machine) error { f(m); return nil }))
}

func (n *node) fault(f machine.Fault) (id int) {
	n.t.Helper()
	n.change(func(m *machine.Machine) { id = state.AddFault(m, f) })
	return id
}

// servers are the process ids of those that hold a device.
func (n *node) servers() (pids []int) {
	for _, p := range n.machine().Processes {
		if p.Kind == machine.MPSServer {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

// as is a user, and variables.
type as struct {
	uid uint32
	env []string
}

func (n *node) command(who as, program string, args ...string) *exec.Cmd {
	c := exec.Command(program, args...)
	c.Env = append([]string{
		"PATH=/nonexistent", "GPUSIM_STATE=" + sysroot.StatePath(n.root), PipeVariable + "=" + n.pipe, LogVariable + "=" + n.log,
	}, append(n.env, who.env...)...)
	if who.uid != 0 {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: who.uid, Gid: who.uid}}
	}
	return c
}

func (n *node) run(c *exec.Cmd) (output string, exit int) {
	n.t.Helper()
	out, err := c.CombinedOutput()
	if e := new(exec.ExitError); errors.As(err, &e) {
		exit = e.ExitCode()
	} else if err != nil {
		n.t.Fatal(err)
	}
	return strings.TrimSuffix(string(out), "\n"), exit
}

func (n *node) controlProgram() string {
	return filepath.Join(n.root, "usr/bin/nvidia-cuda-mps-control")
}

// daemon starts a control daemon in the background.
func (n *node) daemon(env ...string) {
	n.t.Helper()
	n.daemonWith(env, "-d")
}

func (n *node) daemonWith(env []string, args ...string) {
	n.t.Helper()
	if out, exit := n.run(n.command(as{env: env}, n.controlProgram(), args...)); exit != 0 || out != "" {
		n.t.Fatalf("start a daemon: %q, exit code %d", out, exit)
	}
}

// control sends a command to the daemon.
func (n *node) control(line string) (output string, exit int) {
	n.t.Helper()
	return n.controlAs(as{}, line)
}

func (n *node) controlAs(who as, line string) (output string, exit int) {
	n.t.Helper()
	c := n.command(who, n.controlProgram())
	c.Stdin = strings.NewReader(line + "\n")
	return n.run(c)
}

// tell is control for a command that works and says something.
func (n *node) tell(line, want string) {
	n.t.Helper()
	n.replies(line, want, 0)
}

// replies checks the answer to a command, and whether it fails.
func (n *node) replies(line, want string, exit int) {
	n.t.Helper()
	if got, code := n.control(line); got != want || code != exit {
		n.t.Errorf("%s: %q, exit code %d, want %q, %d", line, got, code, want, exit)
	}
}

// starts checks what the start of a daemon says, and whether it fails.
func (n *node) starts(want string, exit int) {
	n.t.Helper()
	if got, code := n.run(n.command(as{}, n.controlProgram(), "-d")); got != want || code != exit {
		n.t.Errorf("start: %q, exit code %d, want %q, %d", got, code, want, exit)
	}
}

// becomes waits until a server has a status.
func (n *node) becomes(pid, status string) {
	n.t.Helper()
	n.eventually("server "+pid+" is "+status, func() bool { got, _ := n.control("get_server_status " + pid); return got == status })
}

// ends waits until the daemon has no server.
func (n *node) ends() {
	n.t.Helper()
	n.eventually("no server is left", func() bool { out, _ := n.control("get_server_list"); return out == "" })
}

// server starts a server and waits until it takes clients.
func (n *node) server() (pid string) {
	n.t.Helper()
	n.tell("start_server -uid 0", "")
	pid, _ = n.control("get_server_list")
	n.becomes(pid, "ACTIVE")
	return pid
}

func (n *node) clientCommand(who as, args ...string) *exec.Cmd {
	return n.command(who, filepath.Join(build(n.t), "bin/cuda-client"), args...)
}

// client runs a program to its end.
func (n *node) client(args ...string) (output string, exit int) {
	n.t.Helper()
	return n.run(n.clientCommand(as{}, args...))
}

// gets checks what a program prints and whether it fails.
func (n *node) gets(who as, want string, exit int, args ...string) {
	n.t.Helper()
	got, code := n.run(n.clientCommand(who, args...))
	if !strings.Contains(got, want) || code != exit {
		n.t.Errorf("%v %v: exit code %d, %s\nwant %d and %q", who, args, code, got, exit, want)
	}
}

// holder is a program that holds a device.
type holder struct {
	*exec.Cmd
	n    *node
	mu   sync.Mutex
	said []string
	done chan struct{}
}

// hold starts cuda-client hold. It does not wait for "ready".
func (n *node) hold(who as, args ...string) *holder {
	n.t.Helper()
	h := &holder{Cmd: n.clientCommand(who, append([]string{"hold"}, args...)...), n: n, done: make(chan struct{})}
	out := must.Get(h.StdoutPipe())(n.t)
	must.Do(n.t, h.Start())
	n.t.Cleanup(func() { _ = h.Process.Kill(); <-h.done })
	go func() {
		defer close(h.done)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			h.mu.Lock()
			h.said = append(h.said, lines.Text())
			h.mu.Unlock()
		}
		_ = h.Wait()
	}()
	return h
}

func (h *holder) text() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return strings.Join(h.said, "\n")
}

func (h *holder) says(want string) *holder {
	h.n.t.Helper()
	h.n.eventually("a program says "+want+", but it says "+h.text(), func() bool { return strings.Contains(h.text(), want) })
	return h
}

// stop ends the program and returns its exit code, -1 if it had to be killed.
func (h *holder) stop() int {
	_ = h.Process.Signal(syscall.SIGTERM)
	<-h.done
	return h.ProcessState.ExitCode()
}

func (h *holder) running() bool {
	select {
	case <-h.done:
		return false
	default:
		return true
	}
}

// patience bounds waits that a passing test never comes near.
const patience = time.Minute

func (n *node) eventually(what string, is func() bool) {
	n.t.Helper()
	for deadline := time.Now().Add(patience); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			n.t.Fatalf("waited in vain until %s", what)
		}
	}
}

// kill does not return before the process is gone.
func (n *node) kill(pid int) {
	n.t.Helper()
	must.Do(n.t, syscall.Kill(pid, syscall.SIGKILL))
	n.eventually("a killed process is gone", func() bool { return !alive(pid) })
}

// alive reports whether there is a process that is not a zombie with all its threads.
func alive(pid int) bool {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	const state, threads = 0, 17 // fields after the name
	_, after, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(after)
	return fields[state] != "Z" || fields[threads] != "1" && fields[threads] != "0"
}

func (n *node) smi(args ...string) string {
	n.t.Helper()
	c := exec.Command(filepath.Join(n.root, "usr/bin/nvidia-smi"), args...)
	c.Env = []string{"PATH=/nonexistent"}
	out, _ := n.run(c)
	return out
}

func (n *node) logged(name, text string) bool {
	data := must.Get(os.ReadFile(filepath.Join(n.log, name)))(n.t)
	return strings.Contains(string(data), text)
}

// visible is the daemon's choice of GPUs.
func (n *node) visible(gpus ...int) string {
	var uuids []string
	for _, i := range gpus {
		uuids = append(uuids, n.machine().GPUs[i].UUID)
	}
	return VisibleVariable + "=" + strings.Join(uuids, ",")
}
