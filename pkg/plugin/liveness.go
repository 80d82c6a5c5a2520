// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/partage-dev/partage/pkg/logchange"
)

const livenessTimeout = 5 * time.Second

// livenessProbe calls the plugin as the kubelet does: it asks the registration
// socket for the DRA socket, and that to prepare nothing. This finds a socket file
// that was deleted and a server that hangs.
type livenessProbe struct {
	registrationSocket string
	logger             klog.Logger

	// wasAlive says that a check has succeeded.
	wasAlive atomic.Bool
	starting logchange.Value[string]
	problem  logchange.Problem
}

// check logs what has changed. Failures before the first success are normal.
func (l *livenessProbe) check(ctx context.Context) error {
	err := l.call(ctx)
	if err == nil {
		l.wasAlive.Store(true)
	}
	switch {
	case l.wasAlive.Load():
		l.problem.Log(klog.NewContext(ctx, l.logger), err, "Liveness check failed", "Liveness check succeeds again")
	case l.starting.Set(err.Error()):
		l.logger.Info("The kubelet cannot be served yet", "reason", err)
	}
	return err
}

func (l *livenessProbe) call(ctx context.Context) error {
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
