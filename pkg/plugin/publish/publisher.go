// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package publish keeps the ResourceSlices of a node in the API server: it finds
// out which features the cluster has, hands the slices to the slice controller of
// Kubernetes, confirms that they were stored, and puts back what is deleted.
package publish

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// deletionsTogether is the time in which deletions of slices count as one.
const deletionsTogether = 150 * time.Millisecond

// usualAttempts is how many attempts at confirming may fail before that is
// reported: the slice controller works in the background.
const usualAttempts = 3

// Helper is the part of kubeletplugin.Helper that publishing needs.
type Helper interface {
	PublishResources(ctx context.Context, resources resourceslice.DriverResources) error
}

// Options are all mandatory except where a comment says otherwise.
type Options struct {
	DriverName string
	// NodeName is the node's name and the name of its only pool.
	NodeName   string
	KubeClient kubernetes.Interface
	// Report is called with the reason why the API server does not hold all slices,
	// and with "" when it does.
	Report func(ctx context.Context, reason string)
	// Retry is the delay between attempts. Optional.
	Retry wait.Backoff
}

// Publisher publishes the ResourceSlices of one node. Its methods may be called
// concurrently, except Run.
type Publisher struct {
	driverName, nodeName string
	client               *draclient.Client
	report               func(ctx context.Context, reason string)
	retry                wait.Backoff
	features             *features

	// inventory is what is to be published, nil until there is one.
	inventory atomic.Pointer[device.Inventory]
	// changed asks to publish, recheck to see whether what was published is still
	// there.
	changed, recheck loop.Trigger
	// logged is the last success that was logged.
	logged logchange.Value[string]
}

// New makes a Publisher that does nothing before Run.
func New(o Options) *Publisher {
	if o.Retry.Duration == 0 {
		o.Retry = wait.Backoff{Duration: time.Second, Factor: 1.5, Jitter: 0.1, Steps: 30, Cap: 15 * time.Second}
	}
	client := draclient.New(o.KubeClient)
	return &Publisher{
		driverName: o.DriverName,
		nodeName:   o.NodeName,
		client:     client,
		report:     o.Report,
		retry:      o.Retry,
		features:   newFeatures(o.DriverName, o.NodeName, client.ResourceSlices()),
		changed:    loop.NewTrigger(),
		recheck:    loop.NewTrigger(),
	}
}

// SetInventory replaces what is to be published.
func (p *Publisher) SetInventory(inventory *device.Inventory) {
	p.inventory.Store(inventory)
	p.changed.Fire()
}

// Recheck asks to see whether the API server still holds what was published.
func (p *Publisher) Recheck() { p.recheck.Fire() }

// HandleDroppedFields publishes again, without the fields that the API server turned
// out not to store.
func (p *Publisher) HandleDroppedFields(ctx context.Context, dropped *resourceslice.DroppedFieldsError) {
	if p.features.noteDropped(ctx, dropped) {
		p.changed.Fire()
	}
}

// Run keeps the slices in the API server until ctx ends, once there is an
// inventory. The slice controller behind helper does the work; Run decides what it
// publishes and when. An error means that retrying is useless.
func (p *Publisher) Run(ctx context.Context, helper Helper) error {
	select {
	case <-ctx.Done():
		return nil
	case <-p.changed:
	}
	if !p.probe(ctx) {
		return nil
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watching.Go(func() { p.watch(ctx) })

	attempts := newAttempts(p.retry)
	for ctx.Err() == nil {
		resources := Resources(p.driverName, p.nodeName, p.inventory.Load(), p.features.known())
		if err := helper.PublishResources(ctx, resources); err != nil && ctx.Err() == nil {
			return fmt.Errorf("publish ResourceSlices: %w", err)
		}
		if err := p.confirm(ctx, countDevices(resources, p.nodeName)); err == nil {
			attempts = newAttempts(p.retry)
			p.awaitReason(ctx)
			continue
		} else if attempts.failed++; attempts.failed > usualAttempts && ctx.Err() == nil {
			p.report(ctx, fmt.Sprintf("the ResourceSlices are not in the API server yet: %v", err))
		}
		select {
		case <-ctx.Done():
		case <-p.changed:
		case <-time.After(attempts.delay.Step()):
		}
	}
	return nil
}

// probe finds out which features the cluster has, before anything is published that
// would be misunderstood without them. It tries until there is an answer; false
// says that ctx ended first.
func (p *Publisher) probe(ctx context.Context) bool {
	err := p.retry.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := p.features.probe(ctx)
		if err != nil && ctx.Err() == nil {
			p.report(ctx, fmt.Sprintf("could not ask the API server which features it has: %v", err))
		}
		return err == nil, nil
	})
	return err == nil
}

// awaitReason returns when there is something to publish, or what was published
// is not there any more.
func (p *Publisher) awaitReason(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.changed:
			return
		case <-p.recheck:
		}
		// Slices are deleted several at a time. Another instance on this node
		// may be quicker, and must not be joined in making them.
		if !loop.Pause(ctx, wait.Jitter(deletionsTogether, 1)) {
			return
		}
		if err := p.checkStored(ctx); err != nil {
			klog.FromContext(ctx).Info("Publishing the ResourceSlices again", "reason", err)
			p.logged.Set("")
			return
		}
	}
}

// attempts at confirming one publication.
type attempts struct {
	failed int
	delay  wait.Backoff
}

// newAttempts begins with a short delay: the first attempt comes right after the
// slice controller was called and is nearly always too early.
func newAttempts(retry wait.Backoff) *attempts {
	retry.Duration /= 5
	return &attempts{delay: retry}
}

// Resources are the slices of an inventory in a cluster with these features.
func Resources(driverName, nodeName string, inventory *device.Inventory, f Features) resourceslice.DriverResources {
	return inventory.DriverResources(device.Options{
		Driver:               driverName,
		Pool:                 nodeName,
		NodeName:             nodeName,
		PartitionableDevices: f.PartitionableDevices,
		ConsumableCapacity:   f.ConsumableCapacity,
	})
}

func countDevices(resources resourceslice.DriverResources, pool string) (devices int) {
	for _, slice := range resources.Pools[pool].Slices {
		devices += len(slice.Devices)
	}
	return devices
}
