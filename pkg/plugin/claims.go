// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// PrepareResourceClaims prepares all claims of one pod at the same time. Every
// claim succeeds or fails on its own.
func (p *Plugin) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	defer p.calls.begin()()
	if len(claims) > 0 {
		p.waitSettled(ctx)
	}
	results := make([]kubeletplugin.PrepareResult, len(claims))
	var wg sync.WaitGroup
	for i, claim := range claims {
		wg.Go(func() { results[i] = p.prepare(ctx, claim) })
	}
	wg.Wait()
	byUID := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for i, claim := range claims {
		byUID[claim.UID] = results[i]
	}
	return byUID, nil
}

func (p *Plugin) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) (result kubeletplugin.PrepareResult) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KObj(claim), "claimUID", claim.UID)
	ctx = klog.NewContext(ctx, logger)
	start := time.Now()
	defer recoverAs(ctx, &result.Err)
	p.asked.note(claim, p.DriverName, p.NodeName)

	prepared, err := p.Claims.Prepare(ctx, claim)
	if err != nil {
		err = fmt.Errorf("claim %s: %w", klog.KObj(claim), err)
		if reason := p.ready.hardwareReason(); reason != "" {
			err = fmt.Errorf("%w (%s)", err, reason)
		}
		logger.Error(err, "Prepare failed", "duration", time.Since(start))
		signal(p.failed)
		return kubeletplugin.PrepareResult{Err: err}
	}
	names := make([]string, 0, len(prepared))
	for _, d := range prepared {
		names = append(names, d.Device)
		result.Devices = append(result.Devices, kubeletplugin.Device{
			Requests:     d.Requests,
			PoolName:     d.Pool,
			DeviceName:   d.Device,
			CDIDeviceIDs: d.CDIDeviceIDs,
			ShareID:      d.ShareID,
		})
	}
	logger.Info("Prepared", "devices", names, "duration", time.Since(start))
	return result
}

// UnprepareResourceClaims undoes all claims of a call at the same time.
func (p *Plugin) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	defer p.calls.begin()()
	results := make([]error, len(claims))
	var wg sync.WaitGroup
	for i, claim := range claims {
		wg.Go(func() { results[i] = p.unprepare(ctx, claim) })
	}
	wg.Wait()
	byUID := make(map[types.UID]error, len(claims))
	for i, claim := range claims {
		byUID[claim.UID] = results[i]
	}
	return byUID, nil
}

func (p *Plugin) unprepare(ctx context.Context, claim kubeletplugin.NamespacedObject) (err error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KRef(claim.Namespace, claim.Name), "claimUID", claim.UID)
	ctx = klog.NewContext(ctx, logger)
	start := time.Now()
	defer recoverAs(ctx, &err)
	if p.ready.hardwareReason() != "" {
		// What needs the GPUs stays undone, and the cleaning up that follows their
		// discovery may be over before this call is.
		defer signal(p.failed)
	}

	if err := p.Claims.Unprepare(ctx, claim.UID); err != nil {
		err = fmt.Errorf("claim %s/%s: %w", claim.Namespace, claim.Name, err)
		logger.Error(err, "Unprepare failed", "duration", time.Since(start))
		signal(p.failed)
		return err
	}
	logger.Info("Unprepared", "duration", time.Since(start))
	return nil
}

// WatchHealthStatus declines. The health service is off, so nobody asks.
func (p *Plugin) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// waitSettled holds a call back while the plugin is still starting, so that the
// first pods after a restart do not fail and wait a minute for the next try.
func (p *Plugin) waitSettled(ctx context.Context) {
	timer := time.NewTimer(settleTimeout)
	defer timer.Stop()
	select {
	case <-p.settled:
	case <-ctx.Done():
	case <-timer.C:
	}
}

func (p *Plugin) settle() {
	p.settledOnce.Do(func() { close(p.settled) })
}

// recoverAs turns a panic into the error of the one claim that caused it: a
// defect that one claim can reach must not take down the claims of others, again
// and again at every restart.
func recoverAs(ctx context.Context, err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("internal error in the driver: %v", r)
		klog.FromContext(ctx).Error(*err, "A claim caused a panic, please report this", "stack", string(debug.Stack()))
	}
}
