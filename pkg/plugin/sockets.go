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

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// minSocketAge protects a socket that another instance has just bound and is about
// to listen on.
const minSocketAge = time.Minute

// secondName is added to the pod's UID in the names of sockets.
const secondName = "-2"

// socketUID returns what tells the sockets of this instance from those of others: the
// pod's UID, or another name where an earlier process of the pod was killed and has
// left sockets with that. For a socket with a name that it knows, the kubelet first
// unregisters the earlier process and then registers this one, a second later.
func (o *Options) socketUID(ctx context.Context) types.UID {
	if o.PodUID != "" && isStale(ctx, o.registrationSocket(o.PodUID)) {
		return o.PodUID + secondName
	}
	return o.PodUID
}

// registrationSocket is where the helper listens.
func (o *Options) registrationSocket(uid types.UID) string {
	name := o.DriverName + "-reg.sock"
	if uid != "" {
		name = kubeletplugin.RollingUpdateRegistrarSocketFile(o.RegistrarDir, o.DriverName, uid)
	}
	return filepath.Join(o.RegistrarDir, name)
}

// removeEarlierSockets removes what processes that were killed have left, those of
// this pod and of others.
func (o *Options) removeEarlierSockets(ctx context.Context, own types.UID) {
	if o.PodUID == "" {
		return
	}
	for _, uid := range []types.UID{o.PodUID, o.PodUID + secondName} {
		if uid != own {
			removeIfStale(ctx, o.registrationSocket(uid))
			removeIfStale(ctx, filepath.Join(o.DataDir, "dra-"+string(uid)+".sock"))
		}
	}
	removeStaleSockets(ctx, filepath.Join(o.RegistrarDir, o.DriverName+"-*-reg.sock"))
	removeStaleSockets(ctx, filepath.Join(o.DataDir, "dra-*.sock"))
}

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
		if info, err := os.Lstat(path); err == nil && time.Since(info.ModTime()) >= minSocketAge {
			removeIfStale(ctx, path)
		}
	}
}

func removeIfStale(ctx context.Context, path string) {
	if !isStale(ctx, path) {
		return
	}
	logger := klog.FromContext(ctx)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		logger.Error(err, "Could not remove a stale socket")
		return
	}
	logger.Info("Removed the socket of an instance that was killed", "path", path)
}

// isStale reports whether there is a socket without a listener.
func isStale(ctx context.Context, path string) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != os.ModeSocket {
		return false
	}
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
	if err == nil {
		_ = conn.Close()
		return false
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
