// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/partage-dev/partage/pkg/node/healthsocket"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// Process is a program that was started.
type Process struct {
	Cmd    *exec.Cmd
	Log    *LogBuffer
	Exited chan struct{}
}

func newProcess(cmd *exec.Cmd) *Process {
	p := &Process{Cmd: cmd, Log: &LogBuffer{}, Exited: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.Log, p.Log
	return p
}

// reap waits in the background for the end of a process that was started.
func (p *Process) reap() {
	go func() {
		_ = p.Cmd.Wait()
		close(p.Exited)
	}()
}

// Driver is the driver as a process.
type Driver struct {
	*Process

	healthSocket string
	// Kubelet is connected to the DRA socket.
	Kubelet     drapb.DRAPluginClient
	connections []*grpc.ClientConn
}

// LogBuffer collects what a process writes while tests read it.
type LogBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *LogBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *LogBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// Start runs the driver on the node until the test ends. It returns as soon as the
// kubelet can call it. The driver looks at the GPUs and cleans up much more often than
// by default; flags override that.
func (n *Node) Start(t testing.TB, flags ...string) *Driver {
	t.Helper()
	return n.StartWith(t, nil, flags...)
}

// StartWith is Start with more environment variables.
func (n *Node) StartWith(t testing.TB, environment []string, flags ...string) *Driver {
	t.Helper()
	uid := "uid-" + strconv.Itoa(int(starts.add()))
	socket := filepath.Join(filepath.Dir(n.Root), uid+".sock")
	p := &Driver{healthSocket: socket, Process: newProcess(n.command(uid, append([]string{
		"--health-socket=" + socket, "--poll-interval=200ms", "--claim-check-interval=500ms",
	}, flags...)...))}
	p.Cmd.Env = append(p.Cmd.Env, environment...)
	p.startFor(t)
	p.Register(t, n.RegistrarDir, uid)
	return p
}

// startFor runs the driver until the test ends.
func (p *Driver) startFor(t testing.TB) {
	t.Helper()
	must.Do(t, p.Cmd.Start())
	p.reap()
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("log of the driver:\n%s", p.Log)
		}
	})
}

// command is the command line of the driver in the pod with this UID.
func (n *Node) command(uid string, flags ...string) *exec.Cmd {
	cmd := exec.Command(Built.Driver, append([]string{
		"--node-name=" + NodeName,
		"--kubeconfig=" + n.Kubeconfig,
		"--kube-api-qps=100000", "--kube-api-burst=100000",
		"--driver-root=" + n.DriverRoot(),
		"--proc-root=" + n.Root + "/proc",
		"--sys-root=" + n.Root + "/sys",
		"--cdi-root=" + n.CDIDir,
		"--nvidia-cdi-hook=" + Built.NVIDIAHook,
		"--mps-dir=" + n.MPSDir,
		"--partage-hook=" + Built.Hook,
		"--kubelet-plugins-dir=" + n.PluginsDir,
		"--kubelet-registrar-dir=" + n.RegistrarDir,
		"--pod-resources-socket=" + n.PodResources,
		"--pod-uid=" + uid, "--policy-spread=0s",
		// What they write at times of their own would make the effects of a call differ from
		// one time to the next. Tests about them switch them on.
		"--claim-status=false", "--device-metadata=false",
		"-v=4",
	}, flags...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "POLICY_FILE=" + n.DefaultPolicy()}
	return cmd
}

// Register registers the driver as the kubelet does.
func (p *Driver) Register(t testing.TB, registrar, uid string) {
	t.Helper()
	p.registerAt(t, registrationSocket(registrar, uid))
}

func registrationSocket(registrar, uid string) string {
	return registrar + "/" + kubeletplugin.RollingUpdateRegistrarSocketFile(registrar, DriverName, types.UID(uid))
}

func (p *Driver) registerAt(t testing.TB, socket string) {
	t.Helper()
	t.Cleanup(p.disconnect)
	must.Do(t, p.connect(t.Context(), socket))
}

// connect registers a driver as the kubelet does that has found its socket. It fails when the driver ends before that.
func (p *Driver) connect(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	go func() {
		select {
		case <-p.Exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	err := wait.PollUntilContextCancel(ctx, 5*time.Millisecond, true, func(context.Context) (bool, error) {
		_, err := os.Stat(socket)
		return err == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the registration socket: %w", err)
	}
	conn, err := p.dial("unix://" + socket)
	if err != nil {
		return err
	}
	registration := registerapi.NewRegistrationClient(conn)
	info, err := registration.GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("get the driver's registration: %w", err)
	}
	if _, err := registration.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		return fmt.Errorf("acknowledge the driver's registration: %w", err)
	}
	conn, err = p.dial("unix://" + info.GetEndpoint())
	p.Kubelet = drapb.NewDRAPluginClient(conn)
	return err
}

// dial connects again soon where a socket is there before its process listens.
func (p *Driver) dial(target string) (*grpc.ClientConn, error) {
	soon := grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second},
		MinConnectTimeout: Patience,
	}
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(soon))
	if err == nil {
		p.connections = append(p.connections, conn)
	}
	return conn, err
}

func (p *Driver) disconnect() {
	for _, conn := range p.connections {
		_ = conn.Close()
	}
}

// Until repeats try until it succeeds. It fails the test when the process ends.
func (p *Process) Until(t testing.TB, what string, try func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, Patience, true, func(ctx context.Context) (bool, error) {
		select {
		case <-p.Exited:
			return false, errors.New("the process has ended")
		default:
		}
		last = try(ctx)
		return last == nil, nil
	})
	must.Do(t, err, "waiting for", what, last)
}

// Ready waits until the driver says that it is.
func (p *Driver) Ready(t testing.TB) {
	t.Helper()
	p.Until(t, "readiness", p.Check("readiness"))
}

// Check returns what asks the driver as a probe of the kubelet does.
func (p *Driver) Check(question string) func(context.Context) error {
	return func(ctx context.Context) error {
		return healthsocket.Ask(ctx, p.healthSocket, question)
	}
}

// Stop ends the process as the kubelet does and checks that it ends well.
func (p *Process) Stop(t testing.TB) {
	t.Helper()
	must.Do(t, p.Cmd.Process.Signal(syscall.SIGTERM))
	p.WantExit(t, 0)
}

// WantExit waits for the end of the process and fails unless its exit code is this.
func (p *Process) WantExit(t testing.TB, code int) {
	t.Helper()
	select {
	case <-p.Exited:
		expect.Equal(t, p.Cmd.ProcessState.ExitCode(), code, "the process ended")
	case <-time.After(Patience):
		t.Fatal("the process did not end")
	}
}

// Kill ends the process as a crash does.
func (p *Process) Kill() {
	_ = p.Cmd.Process.Kill()
	<-p.Exited
}

// WantLog fails unless the log contains the text. What a process writes arrives later.
func (p *Process) WantLog(t testing.TB, text string) {
	t.Helper()
	err := Eventually(t.Context(), func() error {
		if !strings.Contains(p.Log.String(), text) {
			return fmt.Errorf("the log does not contain %q", text)
		}
		return nil
	})
	expect.Do(t, err)
}

// Events are the Kubernetes events of the driver, in order.
func (n *Cluster) Events(t testing.TB) []corev1.Event {
	t.Helper()
	return n.API.Events()
}

// Rename renames a file or folder.
func Rename(t testing.TB, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
}

// Flags for how often the driver does something by itself.
var (
	// Quiet is for tests that count effects or calls.
	Quiet = []string{"--poll-interval=1h", "--claim-check-interval=24h"}
	// Frequent makes the driver look at the GPUs and clean up all the time.
	Frequent = []string{"--poll-interval=50ms", "--claim-check-interval=50ms"}
	// Eager makes it release claims that are gone from the API server, too.
	Eager = []string{"--poll-interval=50ms", "--claim-check-interval=50ms", "--orphan-grace=50ms"}
)
