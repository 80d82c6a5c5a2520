// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/grpchealth"
)

// serveHealth answers until stop is called, which closes the listener too.
func (p *Plugin) serveHealth(ctx context.Context) (stop func()) {
	probe := &livenessProbe{registrationSocket: p.registrationSocket(), logger: klog.FromContext(ctx)}
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

// registrationSocket is where the helper listens.
func (p *Plugin) registrationSocket() string {
	o := &p.options
	name := o.DriverName + "-reg.sock"
	if o.PodUID != "" {
		name = kubeletplugin.RollingUpdateRegistrarSocketFile(o.RegistrarDir, o.DriverName, o.PodUID)
	}
	return filepath.Join(o.RegistrarDir, name)
}
