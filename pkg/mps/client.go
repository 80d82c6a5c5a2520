// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/partage-dev/partage/pkg/mps/mpspb"
)

// Client speaks to the supervisor of this node. It can be used before there is one,
// and connects again by itself.
type Client struct {
	socket     string
	connection *grpc.ClientConn
	supervisor mpspb.SupervisorClient
}

// NewClient prepares to speak to the socket; it does not connect yet.
func NewClient(socket string) (*Client, error) {
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		// A supervisor that comes back is found soon: trying a local socket is cheap.
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{
			BaseDelay: backoff.DefaultConfig.BaseDelay / 10, Multiplier: backoff.DefaultConfig.Multiplier,
			Jitter: backoff.DefaultConfig.Jitter, MaxDelay: backoff.DefaultConfig.BaseDelay,
		}}),
	}
	connection, err := grpc.NewClient("unix://"+socket, options...)
	if err != nil {
		return nil, fmt.Errorf("MPS supervisor at %s: %w", socket, err)
	}
	return &Client{socket: socket, connection: connection, supervisor: mpspb.NewSupervisorClient(connection)}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.connection.Close() }

// connectLimit is how long a call waits for somebody who listens to answer.
const connectLimit = 2 * time.Second

// connect ends gRPC's pause after a failure when somebody listens again: a call that
// fails although there is a supervisor costs a pod a minute. Without one the call
// fails at once. What goes wrong here, the call tells.
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

// Ensure is Supervisor.Ensure.
func (c *Client) Ensure(ctx context.Context, spec Spec) (Status, error) {
	c.connect(ctx)
	answer, err := c.supervisor.EnsureSession(ctx, &mpspb.EnsureSessionRequest{Spec: specToProto(spec)})
	if err != nil {
		return Status{}, c.explain(err)
	}
	return statusFromProto(answer.GetStatus()), nil
}

// Stop is Supervisor.Stop.
func (c *Client) Stop(ctx context.Context, id string) error {
	c.connect(ctx)
	_, err := c.supervisor.StopSession(ctx, &mpspb.StopSessionRequest{Id: id})
	return c.explain(err)
}

// List is Supervisor.List.
func (c *Client) List(ctx context.Context) ([]Status, error) {
	c.connect(ctx)
	answer, err := c.supervisor.ListSessions(ctx, &mpspb.ListSessionsRequest{})
	if err != nil {
		return nil, c.explain(err)
	}
	return statusesFromProto(answer), nil
}

// codeOf says with which code an error that wraps another one travels.
var codeOf = []struct {
	err  error
	code codes.Code
}{
	{ErrInvalid, codes.InvalidArgument},
	{ErrDiffers, codes.FailedPrecondition},
	{ErrFaulted, codes.Aborted},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
}

// remote is an error of the supervisor: its text, and what it wraps.
type remote struct {
	text string
	err  error
}

func (r *remote) Error() string { return r.text }
func (r *remote) Unwrap() error { return r.err }

// explain turns an error of gRPC back into the one that the supervisor had.
func (c *Client) explain(err error) error {
	if err == nil {
		return nil
	}
	s := status.Convert(err)
	switch s.Code() {
	case codes.Unavailable:
		return fmt.Errorf("%w on %s: %s", ErrUnavailable, c.socket, s.Message())
	case codes.Unimplemented:
		return fmt.Errorf("the MPS supervisor is older than this program: %s", s.Message())
	}
	for _, known := range codeOf {
		if known.code == s.Code() {
			return &remote{text: s.Message(), err: known.err}
		}
	}
	return errors.New(s.Message())
}
