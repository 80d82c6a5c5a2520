// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// slowListener gives the server each connection late, as a machine with too much to do
// does.
type slowListener struct{ net.Listener }

func (l slowListener) Accept() (net.Conn, error) {
	connection, err := l.Listener.Accept()
	time.Sleep(300 * time.Millisecond)
	return connection, err
}

// oneSession is a supervisor with one session.
type oneSession struct {
	Sessions

	status Status
}

func (s oneSession) List() []Status { return []Status{s.status} }

// serve has these sessions served on a socket.
func serve(t *testing.T, sessions Sessions, wrap func(net.Listener) net.Listener) *Client {
	t.Helper()
	client := newClient(t)
	t.Cleanup(listen(t, client.socket, sessions, wrap))
	return client
}

func newClient(t *testing.T) *Client {
	t.Helper()
	client := must.Get(NewClient(filepath.Join(t.TempDir(), SocketName)))(t)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func listen(t *testing.T, socket string, sessions Sessions, wrap func(net.Listener) net.Listener) (stop func()) {
	t.Helper()
	listener := must.Get(net.Listen("unix", socket))(t)
	server := NewServer(klog.Background(), sessions)
	go func() { _ = server.Serve(wrap(listener)) }()
	return server.Stop
}

// TestReplacedSupervisor: without a supervisor calls fail at once, and one that starts later, or takes the place of another, is reached.
func TestReplacedSupervisor(t *testing.T) {
	client := newClient(t)
	for range 2 {
		expect.Is(t, expect.Err(client.List(t.Context())), ErrUnavailable)
		stop := listen(t, client.socket, oneSession{}, func(l net.Listener) net.Listener { return l })
		expect.Do(t, expect.Err(client.List(t.Context())), "it is not reached by the first call")
		stop()
	}
}

// TestOtherProcess: what listens on the socket by now is reached, although an older process has not ended.
func TestOtherProcess(t *testing.T) {
	client := newClient(t)
	plain := func(l net.Listener) net.Listener { return l }
	t.Cleanup(listen(t, client.socket, oneSession{}, plain))
	expect.Do(t, expect.Err(client.List(t.Context())))
	must.Do(t, os.Remove(client.socket))
	t.Cleanup(listen(t, client.socket, oneSession{status: Status{Message: "the other"}}, plain))
	for began := time.Now(); ; {
		if found := must.Get(client.List(t.Context()))(t); found[0].Message == "the other" {
			return
		}
		if time.Since(began) > time.Minute {
			t.Fatal("the old one still answers")
		}
		time.Sleep(3 * idleLimit) // a connection that is in use stays
	}
}

// TestHangingSupervisor: one that listens and does not answer is waited for, also after a connection to it has failed: otherwise its own
// probes would take it for one that has not started.
func TestHangingSupervisor(t *testing.T) {
	t.Parallel()
	client := newClient(t)
	listener := must.Get(net.Listen("unix", client.socket))(t)
	t.Cleanup(func() { _ = listener.Close() })
	expect.Is(t, expect.Err(client.List(t.Context())), ErrUnavailable) // after connectLimit
	ctx, cancel := context.WithTimeout(t.Context(), connectLimit/2)
	defer cancel()
	expect.Is(t, expect.Err(client.List(ctx)), context.DeadlineExceeded)
}

// TestReplacedAtOnce: the first call reaches what listens on the socket by now, although the connection has only just ended.
func TestReplacedAtOnce(t *testing.T) {
	client := newClient(t)
	for range 100 {
		stop := listen(t, client.socket, oneSession{}, func(l net.Listener) net.Listener { return l })
		must.Do(t, expect.Err(client.List(t.Context())))
		stop()
	}
}

// TestHangingBeside: who waits for a supervisor that hangs ends no wait of those who ask later, such as another probe, and keeps nobody
// from its successor.
func TestHangingBeside(t *testing.T) {
	t.Parallel()
	for _, replaced := range []bool{false, true} {
		client := newClient(t)
		hanging := must.Get(net.Listen("unix", client.socket))(t)
		t.Cleanup(func() { _ = hanging.Close() })
		go func() { _, _ = client.List(t.Context()) }()
		time.Sleep(connectLimit / 2) // its attempt ends in the middle of the next one
		if replaced {
			must.Do(t, os.Rename(client.socket, client.socket+".old"))
			t.Cleanup(listen(t, client.socket, oneSession{}, func(l net.Listener) net.Listener { return l }))
			expect.Do(t, expect.Err(client.List(t.Context())), "the successor is not reached")
			continue
		}
		ctx, cancel := context.WithTimeout(t.Context(), connectLimit*3/5)
		defer cancel()
		expect.Is(t, expect.Err(client.List(ctx)), context.DeadlineExceeded)
	}
}

// TestSlowSupervisor: a supervisor that is slow is there.
func TestSlowSupervisor(t *testing.T) {
	client := serve(t, oneSession{}, func(l net.Listener) net.Listener { return slowListener{l} })
	expect.Do(t, expect.Err(client.List(t.Context())))
}

// TestStatusIsSent: a client gets what the supervisor says, even a text that is not UTF-8.
func TestStatusIsSent(t *testing.T) {
	want := Status{
		Spec: Spec{
			ID: "a", Devices: []string{"GPU-1"}, ThreadPercentage: 5, Memory: map[string]int64{"GPU-1": 1 << 40}, MultiUser: true,
			OnClientKilled: RestartServer, ClientPriority: PriorityNormal,
		},
		Phase: Failed, Message: "a\xff", History: History{Losses: 1, LastLoss: "b", LastLossTime: time.Unix(1, 0).UTC(), Kills: 2, LastKill: "c"},
		Servers: []int{1}, Clients: []int{2, 3}, PipeDir: "/p", ShmDir: "/s",
	}
	for _, v := range []reflect.Value{reflect.ValueOf(want), reflect.ValueOf(want.Spec)} {
		for i := range v.NumField() {
			if v.Field(i).IsZero() {
				t.Errorf("the test has no %s", v.Type().Field(i).Name)
			}
		}
	}
	got, err := serve(t, oneSession{status: want}, func(l net.Listener) net.Listener { return l }).List(t.Context())
	want.Message = "a\uFFFD"
	if diff := cmp.Diff([]Status{want}, got); err != nil || diff != "" {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
}

// TestOtherService: one that does not know a call is older.
func TestOtherService(t *testing.T) {
	client := serve(t, oneSession{}, func(l net.Listener) net.Listener { return l })
	expect.Says(t, client.call(t.Context(), "Later", named{}, &named{}), "older than this program")
}
