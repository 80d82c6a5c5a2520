// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net"
	"os"
	"strconv"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/command"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/health"
	"github.com/partage-dev/partage/pkg/metrics"
	"github.com/partage-dev/partage/pkg/plugin"
	"github.com/partage-dev/partage/pkg/podcgroup"
	"github.com/partage-dev/partage/pkg/steptime"
	"github.com/partage-dev/partage/pkg/usage"
	"github.com/partage-dev/partage/pkg/version"
)

func (c *config) validateMetrics() error {
	if c.metricsAddress == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(c.metricsAddress)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return command.Wrong(metricsAddressFlag, c.metricsAddress, "an address with a port, such as :9485, or nothing")
	}
	return nil
}

// timeNVML counts a call of the NVIDIA library for the operation that it is made for.
func timeNVML(ctx context.Context, call nvml.Call) { steptime.Of(ctx).Add(steptime.NVML, call.Took) }

// rememberingClaims has the facts about claims that are prepared remembered.
type rememberingClaims struct {
	*claim.Manager

	facts *usage.Facts
}

func (r rememberingClaims) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]claim.LiveDevice, error) {
	prepared, err := r.Manager.Prepare(ctx, c)
	if err == nil {
		r.facts.Remember(c)
	}
	return prepared, err
}

// serveMetrics samples what is used of the GPUs and serves metrics, until ctx ends and wait
// returns. Where there is no address, or somebody else has it, it does neither, and what is
// counted is not shown.
func (c *config) serveMetrics(ctx context.Context, o usage.Options) (m *metrics.Metrics, wait func()) {
	options := metrics.Options{
		Driver: driverName, Node: c.nodeName, Version: version.Get().Version, Reasons: plugin.FailureReasons(), XIDs: health.TaintingXIDs(),
	}
	if c.metricsAddress == "" {
		return metrics.New(options), func() {}
	}
	o.Interval = c.sampleInterval
	o.PodOf = func(pid int) string {
		pod, _ := podcgroup.OfProcess(os.DirFS("/proc"), pid)
		return pod.UID
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", c.metricsAddress)
	if err != nil {
		// No pod has to fail for metrics.
		klog.FromContext(ctx).Error(err, "Metrics are not served", "flag", metricsAddressFlag)
		return metrics.New(options), func() {}
	}
	sampler := usage.New(o)
	options.Usage = sampler.Snapshot
	m = metrics.New(options)
	stop := m.Serve(ctx, listener)
	var sampling sync.WaitGroup
	sampling.Go(func() { sampler.Run(ctx) })
	return m, func() {
		stop()
		sampling.Wait()
	}
}
