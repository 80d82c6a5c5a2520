// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
)

const (
	lockName      = "supervisor.lock"
	lockInterval  = 100 * time.Millisecond
	shutdownLimit = 20 * time.Second
)

// Run runs a supervisor that serves its sessions on a socket, until ctx ends. It
// waits for another supervisor that still has the folder: the pod of an upgrade may
// start before the old one has ended.
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

	// Sessions that are adopted end with this supervisor, so it listens first.
	socket := filepath.Join(options.Dir, mps.SocketName)
	listener, err := host.ListenUnix(ctx, socket)
	if err != nil {
		return err
	}
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

// acquireLock returns nil if ctx ended before the lock was free.
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

// serve serves until ctx ends. Calls in progress are then canceled, and serve waits
// until they have undone what they began.
func serve(ctx context.Context, supervisor *Supervisor, listener net.Listener) error {
	server := mps.NewServer(klog.FromContext(ctx), supervisor)
	defer server.Stop()
	defer context.AfterFunc(ctx, server.Stop)() // Serve returns when its calls have
	if err := server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve MPS sessions: %w", err)
	}
	return nil
}
