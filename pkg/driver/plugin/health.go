// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/partage-dev/partage/pkg/node/healthsocket"
	"github.com/partage-dev/partage/pkg/util/logchange"
)

const (
	livenessTimeout = 5 * time.Second
	// startTime is for how long it is no error that the plugin is not alive.
	startTime = time.Minute
)

// serveHealth answers until stop is called, which closes the listener too.
func (p *Plugin) serveHealth(ctx context.Context) (stop func()) {
	problem := logchange.Problem{Patience: startTime}
	return healthsocket.Serve(ctx, p.options.HealthListener, healthsocket.Checks{
		Liveness: func(asked context.Context) error {
			err := p.callMyself(asked)
			problem.Log(klog.NewContext(asked, klog.FromContext(ctx)), err, "Liveness check failed", "Liveness check succeeds")
			return err
		},
		Readiness: func(context.Context) error {
			// The reason is logged when it changes.
			if reason := p.readiness.notReady(); reason != "" {
				return errors.New(reason)
			}
			return nil
		},
	}, func(err error) { p.stop(fmt.Errorf("serve on the health socket: %w", err)) })
}

// callMyself calls the plugin as the kubelet does: it asks the registration
// socket for the DRA socket, and that to prepare nothing. This finds a socket file
// that was deleted and a server that hangs.
func (p *Plugin) callMyself(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, livenessTimeout)
	defer cancel()
	var info *registerapi.PluginInfo
	socket := p.options.registrationSocket(p.socketUID)
	err := withSocket(socket, func(conn grpc.ClientConnInterface) (err error) {
		info, err = registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{})
		return err
	})
	if err != nil {
		return fmt.Errorf("GetInfo on %s: %w", socket, err)
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

// need is what the plugin needs to be ready. The first that is missing is the reason why it is not.
type need int

const (
	// needHardware: the GPUs can be used.
	needHardware need = iota
	// needPolicy: it is known what is to be published.
	needPolicy
	// needSlices: the API server holds the slices as they should be.
	needSlices
	// needRegistration: the kubelet calls this instance. During an upgrade the old instance
	// ends when this one is ready.
	needRegistration
	needs
)

// readiness is why the plugin is not ready, or that it is. It logs every change.
type readiness struct {
	mu      sync.Mutex
	missing [needs]string
}

func newReadiness() *readiness {
	return &readiness{missing: [needs]string{
		needRegistration: "the kubelet has not registered the plugin yet",
		needHardware:     "the GPUs of this node have not been discovered yet",
		needSlices:       "no ResourceSlice has been published yet",
	}}
}

// set records why something is missing; "" says that it is there. It may change any number of times.
func (r *readiness) set(ctx context.Context, n need, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.missing[n] == reason {
		return
	}
	r.missing[n] = reason
	logger := klog.FromContext(ctx)
	switch {
	case reason != "":
		logger.Info("Not ready", "reason", reason)
	case cmp.Or(r.missing[:]...) == "":
		logger.Info("Ready")
	}
}

// hardwareReason returns why the GPUs cannot be used, or "".
func (r *readiness) hardwareReason() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.missing[needHardware]
}

// notReady returns "" when the plugin is ready.
func (r *readiness) notReady() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return cmp.Or(r.missing[:]...)
}
