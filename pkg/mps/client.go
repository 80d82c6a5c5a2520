// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/partage-dev/partage/pkg/util/steptime"
)

// Client speaks to the supervisor of this node, which may start later and be replaced. It may be used concurrently.
type Client struct {
	socket     string
	connection *grpc.ClientConn
}

const (
	// connectLimit is how long a supervisor that listens may take to answer. On a node that starts many pods at once programs may
	// not run for some time.
	connectLimit = 5 * time.Second
	// idleLimit is how long a connection is kept that nobody uses.
	idleLimit = time.Second
)

// NewClient returns a Client of the supervisor on a socket. Calls that follow each other share a connection. Later ones connect anew:
// another process may listen on the socket by then, and a probe has to find out by itself that the supervisor hangs.
func NewClient(socket string) (*Client, error) {
	connection, err := connect(socket)
	if err != nil {
		return nil, err
	}
	return &Client{socket, connection}, nil
}

func connect(socket string) (*grpc.ClientConn, error) {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(codec{})), grpc.WithIdleTimeout(idleLimit),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: connectLimit}))
	if err != nil {
		return nil, fmt.Errorf("MPS supervisor at %s: %w", socket, err)
	}
	return connection, nil
}

// Close ends the connection. Calls fail from then on.
func (c *Client) Close() error { return c.connection.Close() }

// call calls the supervisor. Without one it fails at once.
func (c *Client) call(ctx context.Context, method string, request, answer any) error {
	defer steptime.Of(ctx).Begin(steptime.MPS)()
	state := c.connection.GetState()
	if state == connectivity.Ready || state == connectivity.Idle || state == connectivity.Shutdown {
		err := c.connection.Invoke(ctx, "/"+serviceName+"/"+method, request, answer)
		if state != connectivity.Ready || status.Code(err) != codes.Unavailable {
			return fromStatus(c.socket, err)
		}
	}
	// The connection has ended, or would answer with the error of an attempt that began in the past: another process may listen by now.
	own, err := connect(c.socket)
	if err != nil {
		return err
	}
	defer func() { _ = own.Close() }()
	return fromStatus(c.socket, own.Invoke(ctx, "/"+serviceName+"/"+method, request, answer))
}

// Ensure calls Sessions.Ensure of the supervisor.
func (c *Client) Ensure(ctx context.Context, spec Spec) (status Status, err error) {
	err = c.call(ctx, ensureSession, spec, &status)
	return status, err
}

// Stop calls Sessions.Stop of the supervisor.
func (c *Client) Stop(ctx context.Context, id string) error {
	return c.call(ctx, stopSession, named{id}, &named{})
}

// List calls Sessions.List of the supervisor.
func (c *Client) List(ctx context.Context) ([]Status, error) {
	var all sessionList
	err := c.call(ctx, listSessions, named{}, &all)
	return all.Sessions, err
}
