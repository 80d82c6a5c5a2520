// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/healthsocket"
)

// serveHealth answers until stop is called, which closes the listener too.
func (p *Plugin) serveHealth(ctx context.Context) (stop func()) {
	probe := &livenessProbe{registrationSocket: p.options.registrationSocket(p.socketUID), logger: klog.FromContext(ctx)}
	return healthsocket.Serve(ctx, p.options.HealthListener, healthsocket.Checks{
		Liveness: probe.check,
		Readiness: func(context.Context) error {
			// The reason is logged when it changes.
			if reason := p.readiness.notReady(); reason != "" {
				return errors.New(reason)
			}
			return nil
		},
	}, func(err error) { p.stop(fmt.Errorf("serve on the health socket: %w", err)) })
}
