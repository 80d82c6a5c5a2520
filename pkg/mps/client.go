// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/partage-dev/partage/pkg/mps/mpspb"
	"github.com/partage-dev/partage/pkg/steptime"
)

// Client speaks to the supervisor of this node. It can be used before the supervisor
// runs, and reconnects by itself.
type Client struct {
	socket     string
	connection *grpc.ClientConn
	supervisor mpspb.SupervisorClient
}

// NewClient returns a client of the supervisor that listens on the socket. It does
// not connect yet.
func NewClient(socket string) (*Client, error) {
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			// Long without a supervisor: each call looks for one, see connect.
			Backoff: backoff.DefaultConfig,
			// Without it an attempt has only the delay before the next one.
			MinConnectTimeout: connectLimit,
		}),
	}
	connection, err := grpc.NewClient("unix://"+socket, options...)
	if err != nil {
		return nil, fmt.Errorf("MPS supervisor at %s: %w", socket, err)
	}
	return &Client{socket: socket, connection: connection, supervisor: mpspb.NewSupervisorClient(connection)}, nil
}

// Close closes the connection.
func (c *Client) Close() error { return c.connection.Close() }

// connectLimit is how long a call waits for a supervisor that listens to answer. On a
// node that starts many pods at once programs may not run for some time.
const connectLimit = 5 * time.Second

// connect ends gRPC's backoff if a supervisor listens again: a call that fails
// although there is one costs a pod a minute. Without a supervisor the call fails at
// once. connect returns no error, since the call that follows has the same.
func (c *Client) connect(ctx context.Context) {
	if c.connection.GetState() == connectivity.Ready {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	probe, err := (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
	if err != nil {
		return
	}
	_ = probe.Close()
	c.connection.ResetConnectBackoff()
	c.connection.Connect()
	for state := c.connection.GetState(); state != connectivity.Ready; state = c.connection.GetState() {
		if !c.connection.WaitForStateChange(ctx, state) {
			return
		}
	}
}

// Ensure calls Sessions.Ensure of the supervisor.
func (c *Client) Ensure(ctx context.Context, spec Spec) (Status, error) {
	defer steptime.Of(ctx).Begin(steptime.MPS)()
	c.connect(ctx)
	answer, err := c.supervisor.EnsureSession(ctx, &mpspb.EnsureSessionRequest{Spec: specToProto(spec)})
	if err != nil {
		return Status{}, errorFromProto(c.socket, err)
	}
	return statusFromProto(answer.GetStatus()), nil
}

// Stop calls Sessions.Stop of the supervisor.
func (c *Client) Stop(ctx context.Context, id string) error {
	defer steptime.Of(ctx).Begin(steptime.MPS)()
	c.connect(ctx)
	_, err := c.supervisor.StopSession(ctx, &mpspb.StopSessionRequest{Id: id})
	return errorFromProto(c.socket, err)
}

// List calls Sessions.List of the supervisor.
func (c *Client) List(ctx context.Context) ([]Status, error) {
	defer steptime.Of(ctx).Begin(steptime.MPS)()
	c.connect(ctx)
	answer, err := c.supervisor.ListSessions(ctx, &mpspb.ListSessionsRequest{})
	if err != nil {
		return nil, errorFromProto(c.socket, err)
	}
	return statusesFromProto(answer), nil
}
