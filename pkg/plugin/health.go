// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Services of the health endpoint. The empty name means liveness.
const (
	serviceLiveness  = "liveness"
	serviceReadiness = "readiness"
)

const livenessTimeout = 5 * time.Second

// serveHealth answers until stop is called, which closes the listener too.
func (p *Plugin) serveHealth(ctx context.Context) (stop func()) {
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, &healthServer{
		logger:   klog.FromContext(ctx),
		notReady: p.readiness.notReady,
		alive:    (&livenessProbe{registrationSocket: p.registrationSocket()}).check,
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

	logger   klog.Logger
	notReady func() string
	alive    func(context.Context) error

	mu        sync.Mutex
	wasAlive  bool
	lastError string
}

func (s *healthServer) Check(ctx context.Context, req *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	serving := healthpb.HealthCheckResponse_SERVING
	switch req.GetService() {
	case "", serviceLiveness:
		if err := s.alive(ctx); err != nil {
			serving = healthpb.HealthCheckResponse_NOT_SERVING
			s.logOnce(err.Error())
		} else {
			s.logOnce("")
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

func (s *healthServer) logOnce(problem string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.wasAlive = s.wasAlive || problem == "" }()
	if problem == s.lastError {
		return
	}
	s.lastError = problem
	switch {
	case problem != "" && s.wasAlive:
		s.logger.Error(errors.New(problem), "Liveness check failed")
	case problem != "":
		s.logger.Info("The kubelet cannot be served yet", "reason", problem)
	case s.wasAlive:
		s.logger.Info("Liveness check succeeds again")
	}
}

// livenessProbe asks as the kubelet would: where the DRA service is on the
// registration socket, then to prepare nothing on the DRA socket. That finds a
// socket file that was deleted and a server that hangs.
type livenessProbe struct {
	registrationSocket string
}

func (l *livenessProbe) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, livenessTimeout)
	defer cancel()
	var info *registerapi.PluginInfo
	err := withSocket(l.registrationSocket, func(conn grpc.ClientConnInterface) (err error) {
		info, err = registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{})
		return err
	})
	if err != nil {
		return fmt.Errorf("GetInfo on %s: %w", l.registrationSocket, err)
	}
	err = withSocket(info.GetEndpoint(), func(conn grpc.ClientConnInterface) error {
		_, err := drapb.NewDRAPluginClient(conn).NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{})
		return err
	})
	if err != nil {
		return fmt.Errorf("empty NodePrepareResources on %s: %w", info.GetEndpoint(), err)
	}
	return nil
}

func withSocket(path string, call func(grpc.ClientConnInterface) error) (err error) {
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	return call(conn)
}
