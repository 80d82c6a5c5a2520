// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/metrics"
	"github.com/partage-dev/partage/pkg/panics"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/quote"
	"github.com/partage-dev/partage/pkg/steptime"
)

// ClaimPreparer prepares and unprepares claims. Its methods may be called
// concurrently.
type ClaimPreparer interface {
	// Prepare is idempotent and prepares a claim completely or not at all.
	Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]claim.LiveDevice, error)
	// Unprepare is idempotent; an unknown claim is a success.
	Unprepare(ctx context.Context, uid types.UID) error
}

// draService serves the calls of the kubelet, and of the helper that receives them.
type draService struct {
	claims    ClaimPreparer
	devices   *deviceStates
	startup   *startup
	readiness *readiness
	requested *requestedDevices
	foreign   *foreignClaims
	viewer    ClaimViewer
	troubles  *troubles
	metrics   *metrics.Metrics
	// calls are those in progress.
	calls inflight
	// failed asks to clean up soon.
	failed loop.Trigger
	// stop ends the driver.
	stop func(error)
}

var _ kubeletplugin.DRAPlugin = (*draService)(nil)

// PrepareResourceClaims prepares all claims of one pod at the same time. Every
// claim succeeds or fails on its own.
func (s *draService) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	defer s.calls.begin()()
	results := make([]kubeletplugin.PrepareResult, len(claims))
	var wg sync.WaitGroup
	for i, claim := range claims {
		wg.Go(func() { results[i] = s.prepare(ctx, claim) })
	}
	wg.Wait()
	byUID := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for i, claim := range claims {
		byUID[claim.UID] = results[i]
	}
	return byUID, nil
}

func (s *draService) prepare(ctx context.Context, c *resourceapi.ResourceClaim) (result kubeletplugin.PrepareResult) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KObj(c), "claimUID", c.UID)
	ctx = klog.NewContext(ctx, logger)
	start := time.Now()
	ctx, times := steptime.With(ctx)
	end := s.metrics.Begin(metrics.Prepare)
	defer func() { end(failureReason(result.Err), times) }()
	defer panics.Recover(ctx, &result.Err)
	devices := s.waitForStart(ctx, c)

	prepared, err := s.prepareDevices(ctx, c)
	if err != nil {
		if trouble := s.troubles.of(devices); trouble != "" {
			err = fmt.Errorf("%s: %w", trouble, err)
		}
		err = fmt.Errorf("claim %s: %w", klog.KObj(c), err)
		if reason := s.readiness.hardwareReason(); reason != "" {
			err = fmt.Errorf("%w (%s)", err, reason)
		}
		logger.Error(err, "Prepare failed", "duration", time.Since(start))
		var refused *claim.RefusedError
		if !errors.As(err, &refused) {
			s.failed.Fire()
		}
		return kubeletplugin.PrepareResult{Err: forKubelet(err)}
	}
	names := make([]string, 0, len(prepared))
	for i := range prepared {
		d := &prepared[i]
		names = append(names, d.Device)
		result.Devices = append(result.Devices, kubeletplugin.Device{
			Requests:     d.Requests,
			PoolName:     d.Pool,
			DeviceName:   d.Device,
			CDIDeviceIDs: []string{d.CDIDevice},
			ShareID:      d.ShareID,
			Metadata:     &kubeletplugin.DeviceMetadata{Attributes: metadataAttributes(d)},
		})
	}
	logger.Info("Prepared", "devices", names, "duration", time.Since(start))
	return result
}

// prepareDevices prepares a claim, unless another driver of this name stands against that.
func (s *draService) prepareDevices(ctx context.Context, c *resourceapi.ResourceClaim) ([]claim.LiveDevice, error) {
	if err := s.foreign.refuse(ctx, c.UID, s.requested.results(c), s.isPrepared); err != nil {
		return nil, err
	}
	return s.claims.Prepare(ctx, c)
}

// isPrepared reports whether a claim is known to have its devices.
func (s *draService) isPrepared(uid types.UID) bool {
	live, err := s.viewer.Live()
	return err == nil && slices.ContainsFunc(live, func(c claim.LiveClaim) bool { return c.Claim.UID == uid })
}

// waitForStart waits until the driver knows the devices of a claim, though not for ever. It
// returns the devices.
func (s *draService) waitForStart(ctx context.Context, c *resourceapi.ResourceClaim) []string {
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	devices := s.requested.add(c)
	s.startup.wait(ctx, devices, startupTimeout)
	return devices
}

// maxKubeletError is how long an error may be that the kubelet gets, in bytes. It makes an
// event of the pod of it, with a beginning of its own.
const maxKubeletError = 800

// shortError has the message of another error, in one line and cut.
type shortError struct{ error }

func (e shortError) Error() string { return quote.Line(e.error.Error(), maxKubeletError) }

func (e shortError) Unwrap() error { return e.error }

// forKubelet returns what the kubelet gets of an error; the log has all of it.
func forKubelet(err error) error { return shortError{err} }

// UnprepareResourceClaims unprepares all claims of a call at the same time.
func (s *draService) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	defer s.calls.begin()()
	results := make([]error, len(claims))
	var wg sync.WaitGroup
	for i, claim := range claims {
		wg.Go(func() { results[i] = s.unprepare(ctx, claim) })
	}
	wg.Wait()
	byUID := make(map[types.UID]error, len(claims))
	for i, claim := range claims {
		byUID[claim.UID] = results[i]
	}
	return byUID, nil
}

func (s *draService) unprepare(ctx context.Context, claim kubeletplugin.NamespacedObject) (err error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KRef(claim.Namespace, claim.Name), "claimUID", claim.UID)
	ctx = klog.NewContext(ctx, logger)
	start := time.Now()
	ctx, times := steptime.With(ctx)
	end := s.metrics.Begin(metrics.Unprepare)
	defer func() { end(failureReason(err), times) }()
	defer panics.Recover(ctx, &err)
	if s.readiness.hardwareReason() != "" {
		// What needs the GPUs stays undone, and the cleaning up that follows their
		// discovery may be over before this call is.
		defer s.failed.Fire()
	}

	if err := s.claims.Unprepare(ctx, claim.UID); err != nil {
		err = fmt.Errorf("claim %s/%s: %w", claim.Namespace, claim.Name, err)
		logger.Error(err, "Unprepare failed", "duration", time.Since(start))
		s.failed.Fire()
		return forKubelet(err)
	}
	logger.Info("Unprepared", "duration", time.Since(start))
	return nil
}

// HandleError is called by the helper for failures in the background. Those that
// the helper retries are logged; any other, such as a gRPC server that died, ends
// the driver.
func (s *draService) HandleError(ctx context.Context, err error, msg string) {
	logger := klog.FromContext(ctx)
	switch {
	case errors.Is(err, kubeletplugin.ErrRecoverable):
		if ctx.Err() == nil {
			logger.Error(err, "Will be retried", "while", msg)
		}
	default:
		logger.Error(err, "Cannot go on", "while", msg)
		s.stop(fmt.Errorf("%s: %w", msg, err))
	}
}

// WatchHealthStatus reports the health of the devices that claims have.
func (s *draService) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	return s.devices.watch(ctx, reports)
}
