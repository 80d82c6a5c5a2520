// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"bufio"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/host/hosttest"
	"github.com/partage-dev/partage/pkg/util/wait"
	"github.com/partage-dev/partage/test/must"
)

// headlessVariable makes the test program end its first thread and no other.
const headlessVariable = "PARTAGE_TEST_HEADLESS"

// init runs on the process's first thread, where this leaves it.
func init() {
	if os.Getenv(headlessVariable) != "" {
		runtime.LockOSThread()
	}
}

// TestWaitedFor: a process for which another part of this program has waited.
func TestWaitedFor(t *testing.T) {
	cmd := exec.Command("true")
	must.Do(t, cmd.Start())
	must.Get(unix.Wait4(cmd.Process.Pid, nil, 0, nil))(t)
	p := &Process{done: make(chan struct{})}
	p.await(cmd)
	if !p.Ended() || p.Exit().Known || p.How() != "exit status unknown" {
		t.Errorf("ended: %t, %+v, %q", p.Ended(), p.Exit(), p.How())
	}
}

func TestMain(m *testing.M) {
	if os.Getenv(headlessVariable) != "" {
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // of the thread
	}
	os.Exit(m.Run())
}

func eventually(t *testing.T, what string, question func() bool) {
	t.Helper()
	if err := wait.Until(t.Context(), func() (bool, error) { return question(), nil }); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// headless starts a process whose first thread ends.
func headless(t *testing.T) ID {
	t.Helper()
	self := must.Get(os.Executable())(t)
	cmd := exec.Command(self)
	cmd.Env = []string{headlessVariable + "=1"}
	must.Do(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return must.Get(Identify(cmd.Process.Pid))(t)
}

// A process has ended when all of its threads have. One that was killed may still
// have a thread that waits for the GPU.
func TestFirstThreadEnds(t *testing.T) {
	p := headless(t)
	eventually(t, "the first thread to end", func() bool {
		st, err := readStat(p.PID)
		return err == nil && st.state == 'Z'
	})
	if !p.Alive() {
		t.Error("it is taken for ended while it has threads")
	}
	if err := p.Kill(t.Context()); err != nil || p.Alive() {
		t.Errorf("alive %t, %v", p.Alive(), err)
	}
	if st, err := readStat(p.PID); err == nil && st.threads > 1 {
		t.Errorf("it has %d threads left", st.threads)
	}
}

// A PID that is reused is not the process.
func TestReusedPID(t *testing.T) {
	self, err := Identify(os.Getpid())
	if err != nil || !self.Alive() {
		t.Fatalf("this process: %v", err)
	}
	other := ID{PID: self.PID, Start: self.Start - 1}
	if p, err := Adopt(other, nil); other.Alive() || p != nil || err != nil {
		t.Errorf("alive %t, adopted %v, %v", other.Alive(), p, err)
	}
	must.Do(t, other.Signal(unix.SIGKILL))
}

func TestParseStat(t *testing.T) {
	const fields = "S 7 5 6 0 -1 0 0 0 0 0 0 0 0 0 0 0 3 0 4242 0"
	for text, ok := range map[string]bool{
		"12 (a) " + fields: true, "12 (a) S 7) " + fields: true,
		"": false, "12": false, "12 (a)": false, "12 (a) ": false, "12 (a) S 7": false, "12 (a) S x 5 6 0 -1 0 0 0 0 0 0 0 0 0 0 0 3 0 4242 0": false,
	} {
		st, err := parseStat(12, text)
		if (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
		if ok && (st.state != 'S' || st.parent != 7 || st.threads != 3 || st.start != 4242) {
			t.Errorf("%q: got %+v", text, st)
		}
	}
}

// TestExit: how a process ended that was adopted is known, whether its parent waits for it
// at once or never. Before Linux 6.15 it is not known in the first case; never is it wrong.
func TestExit(t *testing.T) {
	for name, end := range map[string]struct {
		signal unix.Signal
		want   string
		killed bool
	}{
		"killed":         {unix.SIGKILL, "signal 9 (SIGKILL)", true},
		"exits properly": {unix.SIGTERM, "exit status 0", false},
		"faults":         {unix.SIGSEGV, "signal 11 (SIGSEGV)", true},
	} {
		for waits, wait := range map[string]bool{"": false, ", its parent waits": true} {
			t.Run(name+waits, func(t *testing.T) {
				t.Parallel()
				cmd := exec.Command("sh", "-c", `trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; done`)
				// It says when it is ready for signals.
				output := must.Get(cmd.StdoutPipe())(t)
				must.Do(t, cmd.Start())
				id := must.Get(Identify(cmd.Process.Pid))(t)
				unwatched := make(chan struct{})
				t.Cleanup(func() { close(unwatched) })
				p := must.Get(Adopt(id, unwatched))(t)
				if wait {
					go func() { _, _ = cmd.Process.Wait() }()
				}
				must.Get(bufio.NewReader(output).ReadString('\n'))(t)
				must.Do(t, id.Signal(end.signal))
				<-p.Done()
				if wait && !p.Exit().Known {
					t.Skip("this kernel does not tell after the parent has waited")
				}
				if got := p.Exit(); got.String() != end.want || got.Killed() != end.killed || p.How() != end.want {
					t.Errorf("got %+v, %v, want %s", got, p.How(), end.want)
				}
			})
		}
	}
}

func TestDevices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("device nodes need root")
	}
	path := filepath.Join(t.TempDir(), "nvidia0")
	// As a simulated node: there is no driver for it.
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(511, 200))); err != nil {
		t.Skip(err)
	}
	before, err := Devices(os.Getpid())
	if err != nil || before[unix.Mkdev(511, 200)] != "" {
		t.Fatalf("got %v, %v", before, err)
	}
	null := must.Get(os.Open(os.DevNull))(t)
	defer func() { _ = null.Close() }()
	fd := must.Get(unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0))(t)
	defer func() { _ = unix.Close(fd) }()
	want := func() {
		t.Helper()
		got, err := Devices(os.Getpid())
		if err != nil || got[unix.Mkdev(511, 200)] != path || got[unix.Mkdev(1, 3)] != os.DevNull {
			t.Errorf("got %v, %v", got, err)
		}
	}
	want()
	if _, err := Devices(1 << 30); err == nil {
		t.Error("no error for a process that does not exist")
	}
	// A file of a server in the network that somebody has stopped holds up who asks for it, and a client may have one.
	hosttest.HungFolder(t)
	want()
	if !HasDevice(os.Getpid(), map[uint64]bool{unix.Mkdev(511, 200): true}) || HasDevice(os.Getpid(), map[uint64]bool{unix.Mkdev(511, 201): true}) {
		t.Error("it has the node, and no other")
	}
	// Any number of other files neither hides it nor takes time.
	for range mostFiles {
		another, err := unix.Dup(int(null.Fd()))
		if err != nil {
			t.Skip(err)
		}
		defer func() { _ = unix.Close(another) }()
	}
	want()
	if HasDevice(os.Getpid(), nil) {
		t.Error("it has none of no devices")
	}
}

// socketFolder has a listener at real/control.
func socketFolder(t *testing.T, network string) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("/tmp", "socket"))(t) // t.TempDir's may be too long
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must.Do(t, os.Mkdir(filepath.Join(dir, "real"), 0o700))
	listener := must.Get(net.Listen(network, filepath.Join(dir, "real/control")))(t)
	t.Cleanup(func() { _ = listener.Close() })
	return dir
}

func TestListener(t *testing.T) {
	self := must.Get(Identify(os.Getpid()))(t)
	for _, network := range []string{"unixpacket", "unix"} {
		dir := socketFolder(t, network)
		socket, id, err := Listener(t.Context(), dir, "real/control")
		if err != nil || id != self {
			t.Errorf("%s: got %v, %v, want %v", network, id, err, self)
		}
		if alone, err := IdentifySocket(dir, "real/control"); err != nil || alone != socket || socket == (Socket{}) {
			t.Errorf("%s: got %v, %v, want %v", network, alone, err, socket)
		}
		// A link of it is the same, one that is made in its place is not.
		must.Do(t, errors.Join(os.Link(dir+"/real/control", dir+"/link"), os.Remove(dir+"/real/control")))
		if again, err := net.Listen(network, dir+"/real/control"); err != nil {
			t.Fatal(err)
		} else {
			defer func() { _ = again.Close() }()
		}
		if link, id, err := Listener(t.Context(), dir, "link"); err != nil || link != socket || id != self {
			t.Errorf("%s: the link is %v of %v, %v", network, link, id, err)
		}
		if another, err := IdentifySocket(dir, "real/control"); err != nil || another == socket {
			t.Errorf("%s: the one in its place is %v, %v", network, another, err)
		}
	}
}

func TestListenerRefusals(t *testing.T) {
	dir := socketFolder(t, "unixpacket")
	dead := must.Get(net.ListenUnix("unixpacket", &net.UnixAddr{Name: dir + "/dead", Net: "unixpacket"}))(t)
	dead.SetUnlinkOnClose(false)
	if err := errors.Join(dead.Close(), os.WriteFile(dir+"/file", nil, 0o600), os.Symlink("real/control", dir+"/symlink"),
		os.Symlink("real", dir+"/folder"), unix.Mkfifo(dir+"/fifo", 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]error{
		"symlink": unix.ELOOP, "folder/control": unix.ELOOP, "nothing": os.ErrNotExist, "dead": unix.ECONNREFUSED,
		"file": nil, "fifo": nil, "real": nil, "../" + filepath.Base(dir) + "/real/control": unix.EXDEV,
	} {
		_, _, err := Listener(t.Context(), dir, name)
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", name, err, want)
		}
		if _, err := IdentifySocket(dir, name); (err == nil) != (name == "dead") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
