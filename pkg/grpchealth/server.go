// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package grpchealth serves the gRPC health protocol to the kubelet, with one service
// for each kind of probe.
package grpchealth

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// The services of the endpoint. A probe that names no service asks for Liveness.
const (
	Liveness  = "liveness"
	Readiness = "readiness"
)

// timeout bounds a check: one that hangs is a failure.
const timeout = 5 * time.Second

// Checks answer the probes. Nil means SERVING, an error NOT_SERVING.
type Checks struct {
	Liveness, Readiness func(context.Context) error
}

// Serve answers probes on a listener until stop is called, which closes the listener.
// Failed is called with the error if it ends before.
func Serve(listener net.Listener, checks Checks, failed func(error)) (stop func()) {
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, &health{checks: checks})
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

// health has no Watch method: the kubelet does not use it.
type health struct {
	healthpb.UnimplementedHealthServer

	checks Checks
}

func (h *health) Check(ctx context.Context, request *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var err error
	switch request.GetService() {
	case "", Liveness:
		err = h.checks.Liveness(ctx)
	case Readiness:
		err = h.checks.Readiness(ctx)
	default:
		return nil, status.Errorf(codes.NotFound, "unknown service %q, there are %q and %q", request.GetService(), Liveness, Readiness)
	}
	serving := healthpb.HealthCheckResponse_SERVING
	if err != nil {
		serving = healthpb.HealthCheckResponse_NOT_SERVING
	}
	return &healthpb.HealthCheckResponse{Status: serving}, nil
}
