// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/grpchealth"
)

// serveHealth answers until stop is called, which closes the listener too.
func (p *Plugin) serveHealth(ctx context.Context) (stop func()) {
	probe := &livenessProbe{registrationSocket: p.options.registrationSocket(p.socketUID), logger: klog.FromContext(ctx)}
	return grpchealth.Serve(p.options.HealthListener, grpchealth.Checks{
		Liveness: probe.check,
		Readiness: func(context.Context) error {
			// The reason is logged when it changes.
			if reason := p.readiness.notReady(); reason != "" {
				return errors.New(reason)
			}
			return nil
		},
	}, func(err error) { p.stop(fmt.Errorf("serve the health endpoint: %w", err)) })
}
