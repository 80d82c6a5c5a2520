// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

// minSocketAge protects a socket that another instance has just bound and is about
// to listen on.
const minSocketAge = time.Minute

// removeStaleSockets removes the sockets of instances that were killed. With
// rolling updates every instance has socket names of its own, so that no other
// would ever remove them, and the kubelet tries for ever to connect. A socket with a
// listener stays.
func removeStaleSockets(ctx context.Context, pattern string) {
	logger := klog.FromContext(ctx)
	paths, err := filepath.Glob(pattern)
	if err != nil {
		logger.Error(err, "Could not look for stale sockets", "pattern", pattern)
		return
	}
	for _, path := range paths {
		info, err := os.Lstat(path)
		if err != nil || info.Mode().Type() != os.ModeSocket || time.Since(info.ModTime()) < minSocketAge {
			continue
		}
		conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
		if err == nil {
			_ = conn.Close()
			continue
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			logger.Error(err, "Could not remove a stale socket")
			continue
		}
		logger.Info("Removed the socket of an instance that was killed", "path", path)
	}
}
