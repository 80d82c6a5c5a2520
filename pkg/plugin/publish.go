// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
)

// publisher is the part of kubeletplugin.Helper that publishing needs.
type publisher interface {
	PublishResources(ctx context.Context, resources resourceslice.DriverResources) error
}

// Gates without which the API server drops shared counters, and what several
// claims need to have one device; on by default since Kubernetes 1.36.
const (
	featurePartitionable = "DRAPartitionableDevices"
	featureConsumable    = "DRAConsumableCapacity"
)

// publish keeps the ResourceSlices of this node in the API server until ctx
// ends, once there is something to publish. The slice controller does the work;
// this decides what it is given and when it looks again.
func (p *Plugin) publish(ctx context.Context, helper publisher) {
	select {
	case <-ctx.Done():
		return
	case <-p.republish:
	}
	if !p.probe(ctx) {
		return
	}
	p.background.Go(func() { p.watchSlices(ctx) })
	state := publication{delay: p.confirmDelay()}
	for ctx.Err() == nil {
		resources := p.inventory.Load().DriverResources(p.deviceOptions(!p.noCounters.Load(), !p.noShares.Load()))
		if err := helper.PublishResources(ctx, resources); err != nil && ctx.Err() == nil {
			p.fatal(fmt.Errorf("publish ResourceSlices: %w", err))
			return
		}
		state.devices = p.count(resources)
		if p.confirm(ctx, &state) {
			p.awaitReason(ctx, &state)
			continue
		}
		select {
		case <-ctx.Done():
		case <-p.republish:
		case <-state.wait():
		}
	}
}

// awaitReason returns when there is something to publish, or what was published
// is not there any more.
func (p *Plugin) awaitReason(ctx context.Context, state *publication) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.republish:
			return
		case <-p.recheck:
		}
		// Slices are deleted several at a time. Another instance on this node
		// may be quicker, and must not be joined in making them.
		if !pause(ctx, wait.Jitter(deletionsTogether, 1)) {
			return
		}
		if p.missing(ctx) {
			state.told = ""
			return
		}
	}
}

// deletionsTogether is the time in which deletions count as one.
const deletionsTogether = 150 * time.Millisecond

// publication is what publish knows about what the API server holds.
type publication struct {
	// devices is how many were published.
	devices  int
	attempts int
	delay    wait.Backoff
	// told is the last success that was logged.
	told string
}

func (s *publication) wait() <-chan time.Time {
	return time.After(s.delay.Step())
}

// confirmDelay is shorter than that of other retries: the first attempt comes
// right after the slice controller was told and nearly always too early.
func (p *Plugin) confirmDelay() wait.Backoff {
	delay := p.retry
	delay.Duration /= 5
	return delay
}

func (p *Plugin) count(resources resourceslice.DriverResources) (devices int) {
	for _, slice := range resources.Pools[p.NodeName].Slices {
		devices += len(slice.Devices)
	}
	return devices
}

// attemptsBeforeTelling is for how many attempts it is normal that the API
// server does not hold everything yet.
const attemptsBeforeTelling = 4

// confirm tells whether the API server holds what was published, since
// publishing itself reports nothing.
func (p *Plugin) confirm(ctx context.Context, state *publication) bool {
	stored, err := p.storedSlices(ctx)
	if err == nil {
		err = complete(stored, state.devices)
	}
	if err != nil {
		state.attempts++
		if state.attempts >= attemptsBeforeTelling && ctx.Err() == nil {
			p.ready.setSlices(ctx, fmt.Sprintf("the ResourceSlices are not in the API server yet: %v", err))
		}
		return false
	}
	state.attempts, state.delay = 0, p.confirmDelay()
	if told := fmt.Sprint(len(stored), state.devices); told != state.told {
		state.told = told
		klog.FromContext(ctx).Info("Published", "resourceSlices", len(stored), "devices", state.devices)
	}
	p.ready.setSlices(ctx, "")
	return true
}

// listSlices returns all slices of this node, whoever published them.
func (p *Plugin) listSlices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := p.slices.ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: p.ownSlices()})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	return list.Items, nil
}

// storedSlices returns the newest generation of this node's pool.
func (p *Plugin) storedSlices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	all, err := p.listSlices(ctx)
	if err != nil {
		return nil, err
	}
	newest := int64(-1)
	var stored []resourceapi.ResourceSlice
	for _, slice := range all {
		switch pool := slice.Spec.Pool; {
		case pool.Name != p.NodeName || pool.Generation < newest:
		case pool.Generation > newest:
			newest, stored = pool.Generation, []resourceapi.ResourceSlice{slice}
		default:
			stored = append(stored, slice)
		}
	}
	return stored, nil
}

// whole tells whether all slices of the pool are there, whoever published them.
func whole(stored []resourceapi.ResourceSlice) error {
	if len(stored) == 0 {
		return errors.New("there is none")
	}
	if want := stored[0].Spec.Pool.ResourceSliceCount; int64(len(stored)) != want {
		return fmt.Errorf("%d of %d are there", len(stored), want)
	}
	return nil
}

// complete tells whether they also hold what this instance published.
func complete(stored []resourceapi.ResourceSlice, devices int) error {
	if err := whole(stored); err != nil {
		return err
	}
	have := 0
	for _, slice := range stored {
		have += len(slice.Spec.Devices)
	}
	if have != devices {
		return fmt.Errorf("they hold %d devices instead of %d", have, devices)
	}
	return nil
}

// HandleError is called by the helper for what goes wrong in the background.
// What the helper retries is logged; anything else, such as a gRPC server that
// died, ends the driver.
func (p *Plugin) HandleError(ctx context.Context, err error, msg string) {
	logger := klog.FromContext(ctx)
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped):
		p.handleDropped(ctx, dropped)
	case errors.Is(err, kubeletplugin.ErrRecoverable):
		if ctx.Err() == nil {
			logger.Error(err, "Will be retried", "while", msg)
		}
	default:
		logger.Error(err, "Cannot go on", "while", msg)
		p.fatal(fmt.Errorf("%s: %w", msg, err))
	}
}

// handleDropped tells once per set of features. Slices that lost their counters
// would let a whole GPU and its partitions be allocated at the same time, so they
// are replaced at once by slices that need none.
func (p *Plugin) handleDropped(ctx context.Context, dropped *resourceslice.DroppedFieldsError) {
	features := dropped.DisabledFeatures()
	if _, told := p.droppedOnce.LoadOrStore(strings.Join(features, ","), true); !told {
		klog.FromContext(ctx).Info("The API server dropped fields of the published ResourceSlices because feature gates are off",
			"featureGates", features, "pool", dropped.PoolName)
	}
	if slices.Contains(features, featurePartitionable) && p.noCounters.CompareAndSwap(false, true) {
		p.logNoCounters(ctx, "the API server dropped the shared counters")
		signal(p.republish)
	}
	if slices.Contains(features, featureConsumable) && p.noShares.CompareAndSwap(false, true) {
		p.logNoShares(ctx, "the API server dropped what shares need")
		signal(p.republish)
	}
}
