// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/partage-dev/partage/test/flow/killpoint"
)

// quiet keeps the driver from doing anything by itself while effects are counted.
// frequent makes it look at the GPUs and clean up all the time, and eager also
// release claims that are gone.
var (
	quiet    = []string{"--poll-interval=1h", "--reconcile-interval=1h"}
	frequent = []string{"--poll-interval=50ms", "--reconcile-interval=50ms"}
	eager    = []string{"--poll-interval=100ms", "--reconcile-interval=50ms", "--orphan-grace=50ms"}
)

// supervised is a driver that can be killed at an effect. Unlike one that start
// makes it is not tied to a test: close ends it.
type supervised struct {
	*process
	*killpoint.Supervisor
	uid         string
	connections []*grpc.ClientConn
}

// spawn starts the driver and does not wait for anything.
func (n *node) spawn(flags ...string) (*supervised, error) {
	uid := "uid-" + itoa(int(starts.add()))
	s := &supervised{process: &process{cmd: n.command(uid, append([]string{"--health-port=0"}, flags...)...), log: &logBuffer{}, exited: make(chan struct{})}, uid: uid}
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	var err error
	if s.Supervisor, err = killpoint.Start(s.cmd); err != nil {
		return nil, fmt.Errorf("start the driver: %w\n%s", err, s.log)
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.exited)
	}()
	return s, nil
}

// connect does what the kubelet does, and fails when the driver ends before that.
func (s *supervised) connect(ctx context.Context, registrar string) error {
	ctx, cancel := context.WithTimeout(ctx, eventually)
	defer cancel()
	go func() {
		select {
		case <-s.exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	socket := registrar + "/" + kubeletplugin.RollingUpdateRegistrarSocketFile(registrar, driverName, typesUID(s.uid))
	err := wait.PollUntilContextCancel(ctx, 5*time.Millisecond, true, func(context.Context) (bool, error) {
		_, err := os.Stat(socket)
		return err == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the registration socket: %w", err)
	}
	conn, err := s.dial("unix://" + socket)
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
	conn, err = s.dial("unix://" + info.GetEndpoint())
	s.kubelet = drapb.NewDRAPluginClient(conn)
	return err
}

func (s *supervised) dial(target string) (*grpc.ClientConn, error) {
	conn, err := newConn(target)
	if err == nil {
		s.connections = append(s.connections, conn)
	}
	return conn, err
}

// close kills the driver if it runs.
func (s *supervised) close() {
	s.kill()
	for _, conn := range s.connections {
		_ = conn.Close()
	}
}

// startSupervised is start for a driver that can be killed at an effect.
func (n *node) startSupervised(t testing.TB, flags ...string) *supervised {
	t.Helper()
	s := n.mustSpawn(t, flags...)
	if err := s.connect(t.Context(), n.registrar); err != nil {
		t.Fatal(err)
	}
	return s
}

// mustSpawn starts the driver until the test ends.
func (n *node) mustSpawn(t testing.TB, flags ...string) *supervised {
	t.Helper()
	s, err := n.spawn(flags...)
	if errors.Is(err, killpoint.ErrForbidden) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.close()
		if t.Failed() {
			t.Logf("log of the driver:\n%s", s.log)
		}
	})
	return s
}
