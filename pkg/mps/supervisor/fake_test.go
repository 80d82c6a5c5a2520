// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/wait"
)

// init runs on the process's first thread, where this leaves it.
func init() {
	if os.Getenv(headlessVariable) != "" {
		runtime.LockOSThread()
	}
}

// The test program is also the driver's programs, the supervisor's launcher, and a
// supervisor that can be killed.
func TestMain(m *testing.M) {
	switch {
	case os.Getenv(headlessVariable) != "":
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // of the thread
	case filepath.Base(os.Args[0]) == programName:
		os.Exit(fakeControl(os.Args[1:]))
	case filepath.Base(os.Args[0]) == serverName:
		told := make(chan os.Signal, 1)
		signal.Notify(told, syscall.SIGTERM)
		fmt.Println("ready")
		<-told
		os.Exit(0)
	case len(os.Args) > 1 && os.Args[1] == LaunchCommand:
		fmt.Fprintln(os.Stderr, Launch(os.Args[2:]))
		os.Exit(1)
	case len(os.Args) > 1 && os.Args[1] == superviseCommand:
		os.Exit(supervise(os.Args[2], os.Args[3]))
	}
	os.Exit(m.Run())
}

const (
	serverName       = "nvidia-cuda-mps-server"
	superviseCommand = "supervise"
	// headlessVariable makes a process end its first thread and no other.
	headlessVariable = "HEADLESS"
)

// script says how the fake daemon behaves. It is read anew for every command.
type script struct {
	// Exit makes a daemon end at once with this message.
	Exit string `json:"exit,omitempty"`
	// Slow is how long a daemon takes before it listens.
	Slow time.Duration `json:"slow,omitempty"`
	// NoServer makes servers end in failure as soon as they are started.
	NoServer bool `json:"noServer,omitempty"`
	// State is what servers say that they are, ACTIVE if it is empty.
	State string `json:"state,omitempty"`
	// LieDefault and LieServer make what is set not be in effect.
	LieDefault bool `json:"lieDefault,omitempty"`
	LieServer  bool `json:"lieServer,omitempty"`
	// Hang makes the daemon not answer.
	Hang bool `json:"hang,omitempty"`
	// Stay makes the daemon not react to quit and SIGTERM.
	Stay bool `json:"stay,omitempty"`
	// Away makes servers a session of their own, and hides the marker from them.
	Away    bool  `json:"away,omitempty"`
	Clients []int `json:"clients,omitempty"`
	// User has the daemon replace a server that ended by one for this user.
	User string `json:"user,omitempty"`
	// Calls is the PID that the daemon says its server has.
	Calls int `json:"calls,omitempty"`
}

func readScript() (s script) {
	// The program is at <root>/usr/bin/….
	data, err := os.ReadFile(filepath.Join(filepath.Dir(os.Args[0]), "../../script.json"))
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "no script:", err)
	}
	return s
}

func fakeControl(args []string) int {
	if len(args) == 0 {
		return fakeClient()
	}
	d := &fakeDaemon{log: os.Getenv("CUDA_MPS_LOG_DIRECTORY"), pipe: os.Getenv("CUDA_MPS_PIPE_DIRECTORY"),
		defaults: map[string]string{"percentage": "100.0"}}
	return d.run(args)
}

// fakeClient sends its input as one message, as NVIDIA's sockets are of that type.
func fakeClient() int {
	connection, err := net.Dial("unixpacket", filepath.Join(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "control"))
	if err != nil {
		fmt.Println("Cannot find MPS control daemon process")
		return 1
	}
	input := make([]byte, 1<<16)
	n, _ := os.Stdin.Read(input)
	_, _ = connection.Write(input[:n])
	n, err = connection.Read(input)
	if err != nil {
		fmt.Println("lost the connection")
		return 1
	}
	fmt.Print(strings.TrimPrefix(string(input[:n]), "ok\n"))
	return 0
}

type fakeDaemon struct {
	pipe, log string

	mu       sync.Mutex
	defaults map[string]string
	server   *fakeServer
}

type fakeServer struct {
	pid    int
	limits map[string]string
}

func (d *fakeDaemon) print(format string, args ...any) {
	file, err := os.OpenFile(filepath.Join(d.log, "control.log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		fmt.Fprintf(file, "[Control %d] "+format+"\n", append([]any{os.Getpid()}, args...)...)
		_ = file.Close()
	}
}

func (d *fakeDaemon) run(args []string) int {
	s := readScript()
	d.print("Starting control daemon")
	if s.Exit != "" {
		d.print("%s", s.Exit)
		return 1
	}
	if s.Stay {
		signal.Ignore(syscall.SIGTERM)
	}
	time.Sleep(s.Slow)
	// What it sees, for the test.
	seen := map[string]string{"args": strings.Join(args, " ")}
	for _, name := range []string{"CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "LD_LIBRARY_PATH"} {
		seen[name] = os.Getenv(name)
	}
	data, _ := json.Marshal(seen)
	_ = os.WriteFile("/dev/shm/seen.json", data, 0o600)
	listener, err := net.Listen("unixpacket", filepath.Join(d.pipe, "control"))
	if err != nil {
		d.print("%v", err)
		return 1
	}
	for {
		connection, err := listener.Accept()
		if err != nil {
			return 1
		}
		go d.converse(connection)
	}
}

func (d *fakeDaemon) converse(connection net.Conn) {
	defer connection.Close()
	input := make([]byte, 1<<16)
	n, err := connection.Read(input)
	if err != nil || n == 0 {
		return
	}
	s := readScript()
	if s.Hang {
		select {}
	}
	answer := "ok\n" // an empty message would look like the end
	for line := range strings.Lines(string(input[:n])) {
		d.print("Cmd:%s", strings.TrimSpace(line))
		if text := d.execute(s, strings.Fields(line)); text != "" {
			answer += text + "\n"
		}
	}
	_, _ = connection.Write([]byte(answer))
}

func (d *fakeDaemon) execute(s script, words []string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(words) == 0 {
		return ""
	}
	ofServer := func(at int) *fakeServer {
		if s.Calls != 0 {
			return &fakeServer{pid: s.Calls, limits: d.defaults}
		}
		if d.server == nil || len(words) <= at || words[at] != strconv.Itoa(d.server.pid) {
			return nil
		}
		return d.server
	}
	switch verb := words[0]; verb {
	case "get_server_list":
		if s.Calls != 0 {
			return strconv.Itoa(s.Calls)
		}
		if d.server != nil {
			return strconv.Itoa(d.server.pid)
		}
		return ""
	case "start_server":
		d.startServer(s)
		return ""
	case "quit":
		if !s.Stay {
			d.killServer()
			os.Exit(0)
		}
		return ""
	case "set_default_active_thread_percentage", "set_default_device_pinned_mem_limit":
		if !s.LieDefault {
			setLimit(d.defaults, words[1:])
		}
		return ""
	case "get_default_active_thread_percentage", "get_default_device_pinned_mem_limit":
		return getLimit(d.defaults, words[1:])
	default:
		server := ofServer(1)
		switch {
		case server == nil:
			return "Server " + words[1] + " not found"
		case verb == "get_server_status":
			if s.State != "" {
				return s.State
			}
			return "ACTIVE"
		case verb == "get_client_list":
			return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(s.Clients)), "\n"), "[]")
		case strings.HasPrefix(verb, "set_"):
			if !s.LieServer {
				setLimit(server.limits, words[2:])
			}
			return ""
		}
		return getLimit(server.limits, words[2:])
	}
}

// setLimit has only the percentage, or a device and its limit.
func setLimit(limits map[string]string, words []string) {
	if len(words) == 1 {
		limits["percentage"] = words[0] + ".0"
		return
	}
	megabytes, _ := strconv.Atoi(strings.TrimSuffix(words[1], "M"))
	limits[words[0]] = words[1]
	if megabytes%1024 == 0 {
		limits[words[0]] = strconv.Itoa(megabytes/1024) + "G" // as drivers print it
	}
}

func getLimit(limits map[string]string, words []string) string {
	if len(words) == 0 {
		return limits["percentage"]
	}
	return limits[words[0]]
}

func (d *fakeDaemon) startServer(s script) {
	if d.server != nil {
		return
	}
	cmd := exec.Command(filepath.Join(filepath.Dir(os.Args[0]), serverName))
	if s.NoServer {
		d.print("Server 4711 exited with status 1")
		return
	}
	if s.Away {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		cmd.Env = []string{}
	}
	ready, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		d.print("%v", err)
		return
	}
	// One that is told to end before would not end in order.
	_, _ = ready.Read(make([]byte, 1))
	server := &fakeServer{pid: cmd.Process.Pid, limits: map[string]string{}}
	for key, value := range d.defaults {
		server.limits[key] = value
	}
	if s.LieServer {
		server.limits["percentage"] = "100.0"
	}
	d.server = server
	user := s.User
	if user == "" {
		user = "0"
	}
	d.print("Starting new server %d for user %s", server.pid, user)
	go func() {
		err := cmd.Wait()
		d.mu.Lock()
		defer d.mu.Unlock()
		if err != nil {
			d.print("Server %d ended: %v", server.pid, err)
		} else {
			d.print("Server %d exited with status 0", server.pid)
		}
		d.server = nil
		if s := readScript(); s.User != "" {
			d.startServer(s)
		}
	}()
}

func (d *fakeDaemon) killServer() {
	if d.server != nil {
		_ = syscall.Kill(d.server.pid, syscall.SIGKILL)
	}
}

// world is a node with a fake driver.
type world struct {
	*testing.T

	dir, root string
	options   Options
}

const (
	gpuA = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
	gpuB = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
)

func newWorld(t *testing.T) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	// Not t.TempDir, which makes sockets' paths too long.
	base, err := os.MkdirTemp("/tmp", "mps")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, dir: filepath.Join(base, "d"), root: filepath.Join(base, "r")}
	t.Cleanup(func() {
		w.nothingLeft("")
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
	})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(w.root, "usr/bin")
	for _, path := range []string{w.dir, bin} {
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{programName, serverName} {
		// A link would lead out of the root.
		if err := os.Link(self, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	w.script(script{})
	w.options = options(w.dir, w.root)
	return w
}

func options(dir, root string) Options {
	return Options{
		Dir: dir, Roots: host.Roots{Driver: root},
		CheckInterval: 50 * time.Millisecond, StartLimit: 20 * time.Second, CommandLimit: 3 * time.Second, EndLimit: 2 * time.Second,
		FirstPause: 100 * time.Millisecond, LongestPause: 400 * time.Millisecond,
	}
}

// script changes how the daemon behaves from now on.
func (w *world) script(s script) {
	w.Helper()
	data, err := json.Marshal(s)
	if err == nil {
		err = host.ReplaceFile(filepath.Join(w.root, "script.json"), data, 0o644)
	}
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) supervisor() *Supervisor {
	w.Helper()
	s, err := New(context.Background(), w.options)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		w.script(script{})
		if err := s.Close(context.Background()); err != nil {
			w.Errorf("close: %v", err)
		}
	})
	return s
}

func (w *world) folder(id string) folder { return folder(filepath.Join(w.dir, id)) }

// nothingLeft checks that there is no process, mount or folder of a session, or of
// any with "". Folders of sessions that were suspended may stay in that case.
func (w *world) nothingLeft(id string) {
	w.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		w.Fatal(err)
	}
	where := filepath.Join(w.dir, id) + "/"
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, where) {
			w.Errorf("mount left: %s", line)
		}
	}
	entries, err := os.ReadDir(w.dir)
	if err != nil {
		w.Fatal(err)
	}
	for _, entry := range entries {
		if id != "" && entry.Name() != id {
			continue
		}
		if id != "" {
			w.Errorf("left: %s", entry.Name())
		}
		left, err := w.folder(entry.Name()).mark().Find()
		if len(left) > 0 || err != nil {
			w.Errorf("processes left of %s: %v, %v", entry.Name(), left, err)
		}
	}
}

// eventually waits until a question about the world is answered with yes.
func eventually(t testing.TB, what string, question func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if wait.Until(ctx, func() (bool, error) { return question(), nil }) != nil {
		t.Fatalf("waited in vain: %s", what)
	}
}

func statusOf(t testing.TB, s *Supervisor, id string) mps.Status {
	t.Helper()
	for _, status := range s.List() {
		if status.Spec.ID == id {
			return status
		}
	}
	t.Fatalf("no session %s", id)
	return mps.Status{}
}

// reaches waits for a session to have a phase and a number of losses.
func reaches(t testing.TB, s *Supervisor, id string, phase mps.Phase, losses int) mps.Status {
	t.Helper()
	var last mps.Status
	eventually(t, fmt.Sprintf("%s to be %s with %d losses", id, phase, losses), func() bool {
		last = statusOf(t, s, id)
		return last.Phase == phase && last.Losses == losses
	})
	return last
}

func kill(t testing.TB, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatalf("kill %d: %v", pid, err)
	}
}

// supervise is a supervisor in a process of its own.
func supervise(dir, root string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := Run(ctx, options(dir, root)); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
