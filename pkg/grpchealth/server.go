// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package grpchealth serves the gRPC health protocol, with one service for each kind of
// probe of the kubelet, and asks such a server. It is for sockets that nobody else may
// connect to: a failing probe ends a pod, so strangers must not be able to make one fail.
package grpchealth

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// The services of the endpoint. A probe that names no service asks for Liveness.
const (
	Liveness  = "liveness"
	Readiness = "readiness"
)

// timeout bounds a check: one that hangs is a failure.
const timeout = 5 * time.Second

// reasonKey is in the trailer of an answer that is not SERVING. The protocol itself has no
// place for a reason.
const reasonKey = "partage-reason-bin"

// Checks answer the probes. Nil means SERVING, an error NOT_SERVING.
type Checks struct {
	Liveness, Readiness func(context.Context) error
}

// Serve answers probes on a listener until stop is called, which closes the listener.
// Failed is called with the error if it ends before.
func Serve(listener net.Listener, checks Checks, failed func(error)) (stop func()) {
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, newHealth(checks))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			failed(err)
		}
	})
	return func() {
		server.Stop()
		wg.Wait()
	}
}

// health has no Watch method: probes do not use it.
type health struct {
	healthpb.UnimplementedHealthServer

	checks map[string]*check
}

func newHealth(checks Checks) *health {
	return &health{checks: map[string]*check{
		Liveness:  {run: checks.Liveness},
		Readiness: {run: checks.Readiness},
	}}
}

func (h *health) Check(ctx context.Context, request *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	service := request.GetService()
	if service == "" {
		service = Liveness
	}
	check := h.checks[service]
	if check == nil {
		return nil, status.Errorf(codes.NotFound, "unknown service %q, there are %q and %q", service, Liveness, Readiness)
	}
	err := check.answer(ctx)
	if err == nil {
		return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}, nil
	}
	// Without a reason the answer is still right.
	_ = grpc.SetTrailer(ctx, metadata.Pairs(reasonKey, err.Error()))
	return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_NOT_SERVING}, nil
}

// check runs once at a time. Who asks while it runs gets the same answer, so one that
// hangs does not add up.
type check struct {
	run   func(context.Context) error
	group singleflight.Group
}

func (c *check) answer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	// It must not end with who asked first.
	detached := context.WithoutCancel(ctx)
	answer := c.group.DoChan("", func() (any, error) {
		ctx, cancel := context.WithTimeout(detached, timeout)
		defer cancel()
		return nil, c.run(ctx)
	})
	select {
	case result := <-answer:
		return result.Err
	case <-ctx.Done():
		return ctx.Err()
	}
}
