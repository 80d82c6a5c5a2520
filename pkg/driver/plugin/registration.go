// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"net"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// onRegistration intercepts the call with which the kubelet reports the outcome of
// the registration. A kubelet that has just started has deleted the slices of its
// node.
func (p *Plugin) onRegistration(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if outcome, ok := req.(*registerapi.RegistrationStatus); ok {
		if outcome.PluginRegistered {
			klog.FromContext(ctx).Info("Registered with the kubelet")
			p.readiness.set(ctx, needRegistration, "")
			p.publisher.Registered()
		} else {
			klog.FromContext(ctx).Error(errors.New(outcome.Error), "The kubelet refused the registration")
			p.readiness.set(ctx, needRegistration, "the kubelet refused the registration: "+outcome.Error)
		}
	}
	return handler(ctx, req)
}

// onArrival records when a call to prepare claims came in. Before it reaches the
// plugin the helper reads the claims from the API server, which may take long
// enough for a later call to release them.
func onArrival(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if path.Base(info.FullMethod) == "NodePrepareResources" {
		ctx = claim.Arrived(ctx)
	}
	return handler(ctx, req)
}

// minSocketAge protects a socket that another instance has just bound and is about
// to listen on.
const minSocketAge = time.Minute

// secondName is added to the pod's UID in the names of sockets.
const secondName = "-2"

// socketUID returns what tells the sockets of this process from those of others: the pod's UID, or another name where an earlier process of
// the pod was killed and has left a socket with that. For a name that it knows, the kubelet first unregisters the earlier process, and
// registers this one a second later: pods that start meanwhile fail.
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

// removeStaleSockets removes the sockets of instances that were killed: of this pod, and of others that are older than minSocketAge. With
// rolling updates every instance has socket names of its own, so that no other
// would ever remove them, and the kubelet tries for ever to connect. A socket with a
// listener stays.
func (o *Options) removeStaleSockets(ctx context.Context) {
	for _, pattern := range []string{filepath.Join(o.RegistrarDir, o.DriverName+"-*-reg.sock"), filepath.Join(o.DataDir, "dra-*.sock")} {
		paths, _ := filepath.Glob(pattern) // the pattern is no wrong one
		for _, path := range paths {
			info, err := os.Lstat(path)
			isOwn := o.PodUID != "" && strings.Contains(filepath.Base(path), string(o.PodUID))
			if err != nil || !isOwn && time.Since(info.ModTime()) < minSocketAge || !isStale(ctx, path) {
				continue
			}
			err = os.Remove(path)
			klog.FromContext(ctx).Info("Removed the socket of an instance that was killed", "path", path, "err", err)
		}
	}
}

// isStale reports whether there is a socket without a listener.
func isStale(ctx context.Context, path string) bool {
	if info, err := os.Lstat(path); err != nil || info.Mode().Type() != os.ModeSocket {
		return false
	}
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path)
	if err == nil {
		_ = conn.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
