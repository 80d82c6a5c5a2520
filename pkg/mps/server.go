// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/gofrs/flock"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps/mpspb"
)

// SocketName is the supervisor's socket in its folder.
const SocketName = "supervisor.sock"

const (
	lockName      = "supervisor.lock"
	lockInterval  = 100 * time.Millisecond
	shutdownLimit = 20 * time.Second
)

// Run is a supervisor with its socket, until ctx ends. One that still has the
// folder is waited for: the pod of an upgrade may come before the old one has gone.
func Run(ctx context.Context, options Options) (err error) {
	logger := klog.FromContext(ctx)
	if err := os.MkdirAll(options.Dir, folderMode); err != nil {
		return fmt.Errorf("make the folder of MPS sessions: %w", err)
	}
	lock, err := acquireLock(ctx, filepath.Join(options.Dir, lockName))
	if lock == nil || err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Unlock()) }()

	// Without a socket there is no use in taking over sessions, which would end with
	// this supervisor.
	socket := filepath.Join(options.Dir, SocketName)
	listener, err := listen(ctx, socket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(socket)) }()
	supervisor, err := New(ctx, options)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	// ctx has ended by then.
	shutdown := context.WithoutCancel(ctx)
	defer func() {
		limited, cancel := context.WithTimeout(shutdown, shutdownLimit)
		defer cancel()
		err = errors.Join(err, supervisor.Close(limited))
		logger.Info("MPS supervisor ended")
	}()
	logger.Info("MPS supervisor is ready", "socket", socket, "sessions", len(supervisor.List()))
	return serve(ctx, supervisor, listener)
}

// acquireLock returns nil when ctx ended before.
func acquireLock(ctx context.Context, path string) (*flock.Flock, error) {
	lock := flock.New(path)
	locked, err := lock.TryLock()
	if err == nil && !locked {
		klog.FromContext(ctx).Info("Another MPS supervisor still has the folder, waiting for its end", "lock", path)
		locked, err = lock.TryLockContext(ctx, lockInterval)
	}
	if !locked && ctx.Err() != nil {
		return nil, nil //nolint:nilnil,nilerr // as said
	}
	if err != nil {
		return nil, fmt.Errorf("lock the folder of MPS sessions: %w", err)
	}
	return lock, nil
}

// listen takes the socket's place; who has the lock knows that nobody listens on
// the one that is there.
func listen(ctx context.Context, path string) (net.Listener, error) {
	// At no time is there a socket that others may connect to.
	temporary := path + ".new"
	if len(temporary) > maxSocketPath {
		return nil, fmt.Errorf("listen on %s: the path has %d bytes, a socket's has at most %d: use a shorter folder",
			temporary, len(temporary), maxSocketPath)
	}
	if err := os.Remove(temporary); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", temporary)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if unix, ok := listener.(*net.UnixListener); ok {
		unix.SetUnlinkOnClose(false) // not by its first name
	}
	if err := errors.Join(os.Chmod(temporary, 0o600), os.Rename(temporary, path)); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", path, err), listener.Close())
	}
	return listener, nil
}

func serve(ctx context.Context, supervisor *Supervisor, listener net.Listener) error {
	logger := klog.FromContext(ctx)
	// What a call was doing is undone when Serve returns.
	server := grpc.NewServer(grpc.WaitForHandlers(true), grpc.UnaryInterceptor(
		func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			return handler(klog.NewContext(ctx, logger), request)
		}))
	mpspb.RegisterSupervisorServer(server, &service{supervisor: supervisor})
	var wg sync.WaitGroup
	defer wg.Wait()
	served := make(chan struct{})
	defer close(served)
	wg.Go(func() {
		select {
		case <-ctx.Done():
		case <-served:
		}
		// Calls in progress end with their contexts, and what they started with them.
		server.Stop()
	})
	if err := server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve MPS sessions: %w", err)
	}
	return nil
}

// service is the supervisor's protocol.
type service struct {
	mpspb.UnimplementedSupervisorServer

	supervisor *Supervisor
}

func (s *service) EnsureSession(ctx context.Context, request *mpspb.EnsureSessionRequest) (*mpspb.EnsureSessionResponse, error) {
	status, err := s.supervisor.Ensure(ctx, specFromProto(request.GetSpec()))
	if err != nil {
		klog.FromContext(ctx).Error(err, "EnsureSession failed", "session", request.GetSpec().GetId())
		return nil, encode(err)
	}
	return &mpspb.EnsureSessionResponse{Status: statusToProto(status)}, nil
}

func (s *service) StopSession(ctx context.Context, request *mpspb.StopSessionRequest) (*mpspb.StopSessionResponse, error) {
	if err := s.supervisor.Stop(ctx, request.GetId()); err != nil {
		klog.FromContext(ctx).Error(err, "StopSession failed", "session", request.GetId())
		return nil, encode(err)
	}
	return &mpspb.StopSessionResponse{}, nil
}

func (s *service) ListSessions(context.Context, *mpspb.ListSessionsRequest) (*mpspb.ListSessionsResponse, error) {
	return statusesToProto(s.supervisor.List()), nil
}

func encode(err error) error {
	code := codes.Internal
	for _, known := range codeOf {
		if errors.Is(err, known.err) {
			code = known.code
			break
		}
	}
	return status.Error(code, err.Error())
}
