// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"path"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/partage-dev/partage/pkg/claim"
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
			p.neighbours.registered()
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
