// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/tenant"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/panics"
	"github.com/partage-dev/partage/pkg/util/steptime"
)

// draService serves the calls of the kubelet, and of the helper that receives them.
type draService struct {
	*shared
	// calls are those in progress.
	calls inflight
}

var _ kubeletplugin.DRAPlugin = (*draService)(nil)

// PrepareResourceClaims prepares all claims of one pod at the same time. Every
// claim succeeds or fails on its own. An error becomes an event of the pod.
func (s *draService) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	defer s.calls.begin()()
	return atOnce(claims, func(c *resourceapi.ResourceClaim) (types.UID, kubeletplugin.PrepareResult) {
		result := s.prepare(ctx, c)
		result.Err = tenant.Error(result.Err, c.Namespace, c.UID)
		return c.UID, result
	}), nil
}

// atOnce handles all claims of a call at the same time.
func atOnce[Claim, Result any](claims []Claim, handle func(Claim) (types.UID, Result)) map[types.UID]Result {
	results := make(map[types.UID]Result, len(claims))
	var mu sync.Mutex
	var running sync.WaitGroup
	for _, c := range claims {
		running.Go(func() {
			uid, result := handle(c)
			mu.Lock()
			defer mu.Unlock()
			results[uid] = result
		})
	}
	running.Wait()
	return results
}

func (s *draService) prepare(ctx context.Context, c *resourceapi.ResourceClaim) (result kubeletplugin.PrepareResult) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KObj(c), "claimUID", c.UID)
	ctx = klog.NewContext(ctx, logger)
	start := time.Now()
	ctx, times := steptime.With(ctx)
	end := s.options.Metrics.Begin(metrics.Prepare)
	defer func() { end(failureReason(result.Err), times) }()
	defer panics.Recover(ctx, &result.Err)
	own, devices := s.requested.add(c)
	waited := times.Begin(steptime.Wait)
	s.startup.wait(ctx, devices, startupTimeout)
	waited()

	var prepared []claim.LiveDevice
	err := s.neighbours.refuse(ctx, c.UID, own, s.startup.gpus, s.isPrepared)
	if err == nil {
		prepared, err = s.options.Claims.Prepare(ctx, c)
	}
	if err != nil {
		if why := s.states.unusable(devices); why != "" {
			err = fmt.Errorf("%s: %w", why, err)
		}
		err = fmt.Errorf("claim %s: %w", klog.KObj(c), err)
		if reason := s.readiness.hardwareReason(); reason != "" {
			err = fmt.Errorf("%w (%s)", err, reason)
		}
		logger.Error(err, "Prepare failed", "duration", time.Since(start))
		var refused *claim.RefusedError
		if !errors.As(err, &refused) {
			s.pollNow.Fire()
		}
		return kubeletplugin.PrepareResult{Err: err}
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

// isPrepared reports whether a claim is known to have its devices.
func (s *draService) isPrepared(uid types.UID) bool {
	live, err := s.options.Claims.Live()
	return err == nil && slices.ContainsFunc(live, func(c claim.LiveClaim) bool { return c.Claim.UID == uid })
}

// UnprepareResourceClaims unprepares all claims of a call at the same time.
func (s *draService) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	defer s.calls.begin()()
	return atOnce(claims, func(c kubeletplugin.NamespacedObject) (types.UID, error) {
		return c.UID, tenant.Error(s.unprepare(ctx, c), c.Namespace, c.UID)
	}), nil
}

func (s *draService) unprepare(ctx context.Context, claim kubeletplugin.NamespacedObject) (err error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KRef(claim.Namespace, claim.Name), "claimUID", claim.UID)
	ctx = klog.NewContext(ctx, logger)
	start := time.Now()
	ctx, times := steptime.With(ctx)
	end := s.options.Metrics.Begin(metrics.Unprepare)
	defer func() { end(failureReason(err), times) }()
	defer panics.Recover(ctx, &err)
	if s.readiness.hardwareReason() != "" {
		// What needs the GPUs stays undone, and the cleaning up that follows their
		// discovery may be over before this call is.
		defer s.pollNow.Fire()
	}

	if err := s.options.Claims.Unprepare(ctx, claim.UID); err != nil {
		err = fmt.Errorf("claim %s/%s: %w", claim.Namespace, claim.Name, err)
		logger.Error(err, "Unprepare failed", "duration", time.Since(start))
		s.pollNow.Fire()
		return err
	}
	logger.Info("Unprepared", "duration", time.Since(start))
	return nil
}

// HandleError is called by the helper for failures in the background. Those that
// the helper retries are logged; any other, such as a gRPC server that died, ends
// the driver.
func (s *draService) HandleError(ctx context.Context, err error, msg string) {
	logger := klog.FromContext(ctx)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		logger.Error(err, "Cannot go on", "while", msg)
		s.stop(fmt.Errorf("%s: %w", msg, err))
	} else if ctx.Err() == nil {
		logger.Error(err, "Will be retried", "while", msg)
	}
}

// WatchHealthStatus reports the health of the devices that claims have.
func (s *draService) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	return s.states.watch(ctx, reports)
}

// inflight counts calls. Its zero value is ready.
type inflight struct {
	mu    sync.Mutex
	count int
	ended time.Time
}

// begin counts a call until end is called.
func (f *inflight) begin() (end func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.count--
		f.ended = time.Now()
	}
}

// waitIdle waits until no call is running and none has ended for the time quiet.
// It returns false if that does not happen within timeout.
func (f *inflight) waitIdle(ctx context.Context, timeout, quiet time.Duration) bool {
	isIdle := func(context.Context) (bool, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.count == 0 && time.Since(f.ended) >= quiet, nil
	}
	return wait.PollUntilContextTimeout(context.WithoutCancel(ctx), 10*time.Millisecond, timeout, true, isIdle) == nil
}

// requestedDevices are the devices of this driver's pool that the kubelet asked to
// prepare since the list was last emptied. They are allocated, even if preparing
// them fails and no record says so.
type requestedDevices struct {
	driverName, poolName string

	mu    sync.Mutex
	names sets.Set[string]
}

// add notes the devices that a claim was allocated of this driver's pool, and returns them, also by name.
func (r *requestedDevices) add(c *resourceapi.ResourceClaim) (own []resourceapi.DeviceRequestAllocationResult, names []string) {
	if c.Status.Allocation == nil {
		return nil, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, result := range c.Status.Allocation.Devices.Results {
		if result.Driver == r.driverName && result.Pool == r.poolName {
			own, names = append(own, result), append(names, result.Device)
		}
	}
	r.names = sets.New(names...).Union(r.names)
	return own, names
}

// drain returns the names and empties the list.
func (r *requestedDevices) drain() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.names.Clear()
	return r.names.UnsortedList()
}

// startPatience is for how long a GPU that does not answer holds up claims on GPUs
// that an earlier process has discovered.
const startPatience = 3 * time.Second

// startup holds calls back while the plugin is starting, so that the first pods
// after a restart do not fail and wait a minute for the next attempt.
type startup struct {
	// finish lets all calls through: there is an inventory and leftovers are removed,
	// or it is known that there is no driver yet.
	finish func()
	// opened says that the GPUs can be used. If they are not all discovered soon, because
	// one of them does not answer, calls for devices that were recalled are let through.
	opened func()
	// inventory has the devices that claims can have, at first those that an earlier process has discovered. It is nil as long as there are none.
	inventory atomic.Pointer[device.Inventory]

	done, patience chan struct{}
}

func newStartup() *startup {
	s := &startup{done: make(chan struct{}), patience: make(chan struct{})}
	s.finish = sync.OnceFunc(func() { close(s.done) })
	s.opened = sync.OnceFunc(func() { time.AfterFunc(startPatience, func() { close(s.patience) }) })
	return s
}

// wait returns when a call for these devices may go on, ctx ends, or timeout has
// passed.
func (s *startup) wait(ctx context.Context, devices []string, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for patience := s.patience; ; patience = nil {
		select {
		case <-s.done:
			return
		case <-ctx.Done():
			return
		case <-patience:
			if s.knows(devices) {
				return
			}
		}
	}
}

func (s *startup) knows(devices []string) bool {
	inventory := s.inventory.Load()
	return inventory != nil && !slices.ContainsFunc(devices, func(name string) bool {
		_, known := inventory.Lookup(name)
		return !known
	})
}

// gpus are those of the node, nil as long as they are not known.
func (s *startup) gpus() (all []gpu.GPU) {
	if inventory := s.inventory.Load(); inventory != nil {
		for _, address := range inventory.PCIAddresses() {
			all = append(all, *inventory.GPU(address))
		}
	}
	return all
}
