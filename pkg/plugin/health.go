// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// Services of the health endpoint. The empty name means liveness.
const (
	serviceLiveness  = "liveness"
	serviceReadiness = "readiness"
)

// serveHealth answers until stop is called, which closes the listener too.
func (p *Plugin) serveHealth(ctx context.Context) (stop func()) {
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, &healthServer{
		notReady: p.readiness.notReady,
		alive:    (&livenessProbe{registrationSocket: p.registrationSocket(), logger: klog.FromContext(ctx)}).check,
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := server.Serve(p.options.HealthListener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			p.stop(fmt.Errorf("serve the health endpoint: %w", err))
		}
	})
	return func() {
		server.Stop()
		wg.Wait()
	}
}

// registrationSocket is where the helper listens.
func (p *Plugin) registrationSocket() string {
	o := &p.options
	name := o.DriverName + "-reg.sock"
	if o.PodUID != "" {
		name = kubeletplugin.RollingUpdateRegistrarSocketFile(o.RegistrarDir, o.DriverName, o.PodUID)
	}
	return filepath.Join(o.RegistrarDir, name)
}

// healthServer implements the gRPC health protocol without its Watch method,
// which the kubelet does not use.
type healthServer struct {
	healthpb.UnimplementedHealthServer

	notReady func() string
	alive    func(context.Context) error
}

func (s *healthServer) Check(ctx context.Context, req *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	serving := healthpb.HealthCheckResponse_SERVING
	switch req.GetService() {
	case "", serviceLiveness:
		if err := s.alive(ctx); err != nil {
			serving = healthpb.HealthCheckResponse_NOT_SERVING
		}
	case serviceReadiness:
		// The reason is logged when it changes.
		if s.notReady() != "" {
			serving = healthpb.HealthCheckResponse_NOT_SERVING
		}
	default:
		return nil, status.Errorf(codes.NotFound, "unknown service %q, there are %q and %q", req.GetService(), serviceLiveness, serviceReadiness)
	}
	return &healthpb.HealthCheckResponse{Status: serving}, nil
}
