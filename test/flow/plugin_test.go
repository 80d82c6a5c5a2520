// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// eventually bounds waits that a passing test never comes near, on a busy machine
// either.
const eventually = 2 * time.Minute

// process is a running driver.
type process struct {
	cmd    *exec.Cmd
	log    *logBuffer
	exited chan struct{}
	health healthpb.HealthClient
	// kubelet is connected to the DRA socket.
	kubelet drapb.DRAPluginClient
}

// logBuffer collects what a process writes while tests read it.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func itoa(i int) string { return strconv.Itoa(i) }

// start runs the driver on the node until the test ends. It returns as soon as
// the kubelet could call it. It looks at the GPUs and cleans up much more often
// than by default; flags that are given again here count.
func (n *node) start(t testing.TB, flags ...string) *process {
	t.Helper()
	uid := "uid-" + itoa(int(starts.add()))
	port := freePort(t)
	p := &process{log: &logBuffer{}, exited: make(chan struct{})}
	p.cmd = n.command(uid, append([]string{
		"--health-port=" + itoa(port), "--poll-interval=200ms", "--reconcile-interval=500ms",
	}, flags...)...)
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.exited)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("log of the driver:\n%s", p.log)
		}
	})
	p.health = healthpb.NewHealthClient(dial(t, "passthrough:///127.0.0.1:"+itoa(port)))
	p.register(t, n.registrar, uid)
	return p
}

// command is the driver on this node, as the pod with this UID.
func (n *node) command(uid string, flags ...string) *exec.Cmd {
	cmd := exec.Command(built.plugin, append([]string{
		"--node-name=" + nodeName,
		"--kubeconfig=" + n.kubeconfig,
		"--kube-api-qps=100000", "--kube-api-burst=100000",
		"--driver-root=" + n.root,
		"--proc-root=" + n.root + "/proc",
		"--sys-root=" + n.root + "/sys",
		"--cdi-root=" + n.cdi,
		"--nvidia-cdi-hook=" + built.hook,
		"--mps-dir=" + n.mps,
		"--mps-supervisor-program=" + built.supervisor,
		"--kubelet-plugins-dir=" + n.plugins,
		"--kubelet-registrar-dir=" + n.registrar,
		"--pod-uid=" + uid,
		"-v=4",
	}, flags...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	return cmd
}

// register does what the kubelet does.
func (p *process) register(t testing.TB, registrar, uid string) {
	t.Helper()
	socket := registrar + "/" + kubeletplugin.RollingUpdateRegistrarSocketFile(registrar, driverName, typesUID(uid))
	p.until(t, "the registration socket", func(context.Context) error {
		if _, err := os.Stat(socket); err != nil {
			return err
		}
		return nil
	})
	registration := registerapi.NewRegistrationClient(dial(t, "unix://"+socket))
	info, err := registration.GetInfo(t.Context(), &registerapi.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := registration.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
	p.kubelet = drapb.NewDRAPluginClient(dial(t, "unix://"+info.GetEndpoint()))
}

// until repeats try until it succeeds, the driver ends or it takes too long.
func (p *process) until(t testing.TB, what string, try func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, eventually, true, func(ctx context.Context) (bool, error) {
		select {
		case <-p.exited:
			return false, errors.New("the driver has ended")
		default:
		}
		last = try(ctx)
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("waiting for %s: %v: %v", what, err, last)
	}
}

// ready waits until the driver says that it is.
func (p *process) ready(t testing.TB) {
	t.Helper()
	p.until(t, "readiness", p.check("readiness"))
}

func (p *process) check(service string) func(context.Context) error {
	return func(ctx context.Context) error {
		answer, err := p.health.Check(ctx, &healthpb.HealthCheckRequest{Service: service}, grpc.WaitForReady(true))
		if err == nil && answer.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			err = errors.New(service + ": " + answer.GetStatus().String())
		}
		return err
	}
}

// stop ends the driver as the kubelet does and checks that it ends well.
func (p *process) stop(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.wantExit(t, 0)
}

func (p *process) wantExit(t testing.TB, code int) {
	t.Helper()
	select {
	case <-p.exited:
		if got := p.cmd.ProcessState.ExitCode(); got != code {
			t.Errorf("the driver ended with %d, want %d", got, code)
		}
	case <-time.After(eventually):
		t.Fatal("the driver did not end")
	}
}

// kill ends the driver as a crash does.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

func (p *process) wantLog(t testing.TB, text string) {
	t.Helper()
	if !strings.Contains(p.log.String(), text) {
		t.Errorf("the log does not contain %q", text)
	}
}

func dial(t testing.TB, target string) grpc.ClientConnInterface {
	t.Helper()
	conn, err := newConn(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// newConn tries again soon when a socket is there and nobody listens yet.
func newConn(target string) (*grpc.ClientConn, error) {
	soon := grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second},
		MinConnectTimeout: eventually,
	}
	return grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(soon))
}

// freePort finds a port below those that the kernel gives to outgoing
// connections, so that nobody takes it before the driver does.
func freePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		port := 20000 + (os.Getpid()%100)*100 + int(ports.add()%100)
		listener, err := net.Listen("tcp", ":"+itoa(port))
		if err == nil {
			_ = listener.Close()
			return port
		}
	}
	t.Fatal("no free port")
	return 0
}

// events are what the driver reported to people, in order.
func (n *node) events(t testing.TB) []corev1.Event {
	t.Helper()
	return n.api.Events()
}

// rename moves files away and back; what is not there is an error.
func rename(t testing.TB, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
}
