// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/partage-dev/partage/pkg/mps/mpspb"
)

// slowListener gives the server each connection late, as a machine with too much to do
// does.
type slowListener struct{ net.Listener }

func (l slowListener) Accept() (net.Conn, error) {
	connection, err := l.Listener.Accept()
	time.Sleep(300 * time.Millisecond)
	return connection, err
}

type noSessions struct {
	mpspb.UnimplementedSupervisorServer
}

func (noSessions) ListSessions(context.Context, *mpspb.ListSessionsRequest) (*mpspb.ListSessionsResponse, error) {
	return &mpspb.ListSessionsResponse{}, nil
}

// A supervisor that is slow is there.
func TestSlowSupervisor(t *testing.T) {
	socket := filepath.Join(t.TempDir(), SocketName)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	mpspb.RegisterSupervisorServer(server, noSessions{})
	go func() { _ = server.Serve(slowListener{listener}) }()
	t.Cleanup(server.Stop)
	if _, err := (Client{Socket: socket}).List(t.Context()); err != nil {
		t.Error(err)
	}
}
