// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/partage-dev/partage/test/flow/killpoint"
)

// KillableDriver is a driver that can be killed at an effect. Close ends it, unless it
// was started for a test.
type KillableDriver struct {
	*Driver
	*killpoint.Supervisor
	uid         string
	connections []*grpc.ClientConn
}

// Spawn starts a driver that can be killed at an effect, and does not wait for
// anything.
func (n *Node) Spawn(flags ...string) (*KillableDriver, error) {
	uid := "uid-" + strconv.Itoa(int(starts.add()))
	process := newProcess(n.command(uid, flags...))
	s := &KillableDriver{Driver: &Driver{Process: process}, uid: uid}
	var err error
	if s.Supervisor, err = killpoint.Start(s.Cmd); err != nil {
		return nil, fmt.Errorf("start the driver: %w\n%s", err, s.Log)
	}
	s.reap()
	return s, nil
}

// Connect registers the driver as the kubelet does. It fails when the driver ends
// before that.
func (s *KillableDriver) Connect(ctx context.Context, registrar string) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	go func() {
		select {
		case <-s.Exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	socket := registrar + "/" + kubeletplugin.RollingUpdateRegistrarSocketFile(registrar, DriverName, types.UID(s.uid))
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
	s.Kubelet = drapb.NewDRAPluginClient(conn)
	return err
}

func (s *KillableDriver) dial(target string) (*grpc.ClientConn, error) {
	conn, err := newConn(target)
	if err == nil {
		s.connections = append(s.connections, conn)
	}
	return conn, err
}

// Close kills the driver if it runs.
func (s *KillableDriver) Close() {
	s.Kill()
	for _, conn := range s.connections {
		_ = conn.Close()
	}
}

// StartKillable is Start for a driver that can be killed at an effect.
func (n *Node) StartKillable(t testing.TB, flags ...string) *KillableDriver {
	t.Helper()
	s := n.MustSpawn(t, flags...)
	if err := s.Connect(t.Context(), n.RegistrarDir); err != nil {
		t.Fatal(err)
	}
	return s
}

// MustSpawn is Spawn for a driver that ends with the test.
func (n *Node) MustSpawn(t testing.TB, flags ...string) *KillableDriver {
	t.Helper()
	s, err := n.Spawn(flags...)
	if errors.Is(err, killpoint.ErrForbidden) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		if t.Failed() {
			t.Logf("log of the driver:\n%s", s.Log)
		}
	})
	return s
}
