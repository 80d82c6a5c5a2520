// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/pkg/driver/plugin"
	"github.com/partage-dev/partage/pkg/driver/usage"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/node/command"
	"github.com/partage-dev/partage/pkg/node/podcgroup"
	"github.com/partage-dev/partage/pkg/policy/xid"
	"github.com/partage-dev/partage/pkg/util/steptime"
	"github.com/partage-dev/partage/pkg/util/version"
)

// metricsPaths are those that mean nothing but themselves.
var metricsPaths = regexp.MustCompile(`^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$`)

func (c *config) validateMetrics() error {
	const want = "an address with a port, such as :9485, or nothing"
	return errors.Join(
		command.Check(metricsAddressFlag, c.metricsAddress, isAddress(c.metricsAddress), want),
		command.Check(nvidiaMetricsAddressFlag, c.nvidiaMetricsAddress, isAddress(c.nvidiaMetricsAddress), want),
		command.Check(nvidiaMetricsPathFlag, c.nvidiaMetricsPath, metricsPaths.MatchString(c.nvidiaMetricsPath), "a path such as "+metrics.Path))
}

// isAddress takes none, too.
func isAddress(text string) bool {
	_, port, err := net.SplitHostPort(text)
	_, portErr := strconv.ParseUint(port, 10, 16)
	return text == "" || err == nil && portErr == nil
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
func (c *config) serveMetrics(ctx context.Context, o usage.Options, eventErrors func() uint64) (m *metrics.Metrics, wait func()) {
	options := metrics.Options{
		Driver: driverName, Node: c.nodeName, Version: version.Get().Version, Reasons: plugin.FailureReasons(), XIDs: xid.Tainting(),
		EventErrors: eventErrors,
	}
	if c.metricsAddress == "" {
		return metrics.New(options), func() {}
	}
	o.Interval = c.sampleInterval
	o.PodOf = func(pid int) string {
		pod, _ := podcgroup.OfProcess(os.DirFS("/proc"), pid)
		return pod.UID
	}
	o.Environ = func(pid int) string {
		text, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ")) // one that has ended has none
		return string(text)
	}
	listener := listen(ctx, metricsAddressFlag, c.metricsAddress)
	if listener == nil {
		return metrics.New(options), func() {}
	}
	sampler := usage.New(o)
	options.Usage = sampler.Snapshot
	m = metrics.New(options)
	stop, stopNVIDIA := m.Serve(ctx, listener), func() {}
	if second := listen(ctx, nvidiaMetricsAddressFlag, c.nvidiaMetricsAddress); second != nil {
		stopNVIDIA = m.ServeNVIDIA(ctx, second, c.nvidiaMetricsPath)
	}
	var sampling sync.WaitGroup
	sampling.Go(func() { sampler.Run(ctx) })
	return m, func() {
		stop()
		stopNVIDIA()
		sampling.Wait()
	}
}

// listen returns nil where there is no address, or where it cannot be had: no pod has to fail for metrics.
func listen(ctx context.Context, flag, address string) net.Listener {
	if address == "" {
		return nil
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Metrics are not served", "flag", flag)
		return nil
	}
	return listener
}
