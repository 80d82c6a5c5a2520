// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/urfave/cli/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor"
	"github.com/partage-dev/partage/pkg/version"
)

// serve runs the supervisor until ctx ends.
func serve(ctx context.Context, c *config, cmd *cli.Command) error {
	if err := c.validate(); err != nil {
		return err
	}
	if err := c.setUpLogging(); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting", "version", version.Get(), "mpsDir", c.mpsDir, "driverRoot", c.driverRoot,
		"checkInterval", c.checkInterval, "healthPort", c.healthPort, "v", c.verbosity, "loggingFormat", cmd.String("logging-format"))
	stop, err := c.serveHealth(ctx)
	if err != nil {
		return err
	}
	defer stop()
	return supervisor.Run(ctx, supervisor.Options{
		Dir:           filepath.Clean(c.mpsDir),
		Roots:         host.Roots{Driver: c.driverRoot},
		CheckInterval: c.checkInterval,
	})
}

// serveHealth answers from the start, so that waiting for an earlier supervisor to
// end is not taken for being dead.
func (c *config) serveHealth(ctx context.Context) (stop func(), err error) {
	if c.healthPort == 0 {
		return func() {}, nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", ":"+strconv.Itoa(c.healthPort))
	if err != nil {
		return nil, fmt.Errorf("listen on --health-port (HEALTH_PORT): %w", err)
	}
	client, err := mps.NewClient(filepath.Join(c.mpsDir, mps.SocketName))
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, &health{list: client.List})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			klog.FromContext(ctx).Error(err, "Health service ended")
		}
	})
	return func() {
		server.Stop()
		wg.Wait()
		_ = client.Close()
	}, nil
}

// The services of the health endpoint; the empty name means liveness.
const (
	liveness  = "liveness"
	readiness = "readiness"

	answerLimit = 5 * time.Second
)

// health implements the gRPC health protocol without its Watch method, which the
// kubelet does not use. It asks as the plugin would, through the socket.
type health struct {
	healthpb.UnimplementedHealthServer

	list func(context.Context) ([]mps.Status, error)
}

func (h *health) Check(ctx context.Context, request *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	serving := healthpb.HealthCheckResponse_SERVING
	_, err := h.list(ctx)
	switch request.GetService() {
	case readiness:
		if err != nil {
			serving = healthpb.HealthCheckResponse_NOT_SERVING
		}
	case "", liveness:
		// Nobody there: another supervisor still has the folder. A restart would
		// not help, but hang it must not.
		if err != nil && !errors.Is(err, mps.ErrUnavailable) {
			serving = healthpb.HealthCheckResponse_NOT_SERVING
		}
	default:
		return nil, status.Errorf(codes.NotFound, "unknown service %q, there are %q and %q", request.GetService(), liveness, readiness)
	}
	return &healthpb.HealthCheckResponse{Status: serving}, nil
}
