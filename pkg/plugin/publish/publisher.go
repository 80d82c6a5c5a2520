// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package publish keeps the ResourceSlices of a node in the API server.
//
//	publisher.go   the loop: when to write, and when to try again
//	plan.go        what to write: wanted against stored. Pure
//	write.go       writing, and checking what was stored
//	stored.go      what the API server holds
//	watch.go       whether somebody else changes it; repairs.go: how often
//	precedence.go  which of several instances on the node publishes
//	features.go    what the cluster can do with devices; probe.go asks for it
//
// It does not use the slice controller of k8s.io/dynamic-resource-allocation, see
// docs/design/publishing.md.
package publish

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	typedresource "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/plugin/internal/precedence"
)

const (
	// changesTogether is the time in which changes by others count as one: slices
	// are deleted several at a time.
	changesTogether = 150 * time.Millisecond
	// giveWayTime is for how long an older instance publishes when this one cannot.
	giveWayTime = 5 * time.Minute
	// precedenceInterval is the time between two looks for a newer instance while
	// there is one. They ask nobody but the kernel.
	precedenceInterval = 2 * time.Second
	// requestTimeout bounds one request. An API server may be slow, but not for ever.
	requestTimeout = 30 * time.Second
	// usualTime is for how long writing may fail before slices that were right once
	// count as wrong: an API server restarts in less.
	usualTime = 30 * time.Second
)

// Options are all mandatory except where a comment says otherwise.
type Options struct {
	DriverName string
	// NodeName is the node's name and the name of its only pool.
	NodeName   string
	KubeClient kubernetes.Interface
	// MetadataClient watches the slices.
	MetadataClient metadata.Interface
	// LockFile makes one of several instances on this node publish. Optional: without
	// it there is a single one.
	LockFile string
	// FirstOwner returns the UID of the node if it was read a moment ago, for the first time that
	// it is needed. Optional.
	FirstOwner func(ctx context.Context) types.UID
	// Report is called with the reason why the API server does not hold what it
	// should, and with "" when it does.
	Report func(ctx context.Context, reason string)
	// Warn tells people what is not offered, or dangerous, because of the cluster.
	Warn func(ctx context.Context, reason, message string)
	// Observe is told after each attempt how many slices are stored as they should be, 0 if
	// another instance sees to that, or why that failed. Optional.
	Observe func(slices int, err error)
	// Retry is the delay between attempts. Optional.
	Retry wait.Backoff
}

// Publisher publishes the ResourceSlices of one node. Its methods may be called
// concurrently, except Run.
type Publisher struct {
	pool     pool
	slices   typedresource.ResourceSliceInterface
	metadata metadata.Interface
	report   func(ctx context.Context, reason string)
	warn     func(ctx context.Context, reason, message string)
	observe  func(slices int, err error)
	retry    wait.Backoff

	// inventory is what is to be published, nil until there is one.
	inventory atomic.Pointer[device.Inventory]
	// changed asks to publish, recheck to read what is stored, seen to look whether
	// what the watch saw is new.
	changed, recheck, seen loop.Trigger
	watcher                watcher
	// listed is what Stored has found.
	listed atomic.Pointer[listed]

	// What follows is for the goroutine of Run.

	precedence        *precedence.Precedence
	precedenceProblem logchange.Problem
	features          features
	// firstOwner is nil once it was called.
	firstOwner func(ctx context.Context) types.UID
	// known is nil while it is not known what is stored.
	known *stored
	// repairs are those of what others changed.
	repairs repairs
	// confirmed says that everything was stored at some time, failing since when it
	// could not be since then.
	confirmed bool
	failing   time.Time
	// published, leftOut and crashes were logged last.
	published, leftOut, crashes logchange.Value[string]
}

// New makes a Publisher that does nothing before Run.
func New(o Options) *Publisher {
	if o.Retry.Duration == 0 {
		o.Retry = wait.Backoff{Duration: time.Second, Factor: 1.5, Jitter: 0.5, Steps: 30, Cap: 20 * time.Second}
	}
	if o.Observe == nil {
		o.Observe = func(int, error) {}
	}
	pool := pool{driverName: o.DriverName, nodeName: o.NodeName}
	p := &Publisher{
		pool:       pool,
		slices:     o.KubeClient.ResourceV1().ResourceSlices(),
		metadata:   o.MetadataClient,
		firstOwner: o.FirstOwner,
		report:     o.Report,
		warn:       o.Warn,
		observe:    o.Observe,
		retry:      o.Retry,
		changed:    loop.NewTrigger(),
		recheck:    loop.NewTrigger(),
		seen:       loop.NewTrigger(),
		precedence: precedence.New(o.LockFile),
		features:   features{prober: prober{pool: pool, client: o.KubeClient.ResourceV1().RESTClient()}},
	}
	p.watcher = watcher{client: o.MetadataClient, selector: pool.selector(), changed: p.seen.Fire, unheard: p.recheck.Fire}
	return p
}

// SetInventory replaces what is to be published.
func (p *Publisher) SetInventory(inventory *device.Inventory) {
	p.inventory.Store(inventory)
	p.changed.Fire()
}

// Recheck asks to read what the API server holds.
func (p *Publisher) Recheck() { p.recheck.Fire() }

// Run keeps the slices in the API server until ctx ends, once there is an inventory.
func (p *Publisher) Run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-p.changed:
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watching.Go(func() { p.watcher.run(ctx) })
	defer p.precedence.End()

	retry := p.retry
	for ctx.Err() == nil {
		began := time.Now()
		wrote, err := p.sync(ctx)
		switch {
		case ctx.Err() != nil:
		case err == nil:
			retry = p.retry
			p.succeeded(ctx)
			p.awaitReason(ctx, wrote)
		case errors.Is(err, errNotMine):
			p.failing = time.Time{}
			p.observe(0, nil)
			p.awaitPrecedence(ctx)
		default:
			p.failed(ctx, began, err)
			p.awaitRetry(ctx, err, retry.Step())
			if refusesFields(err) {
				// They may be some that the cluster cannot store any more.
				p.features.hurry()
			}
			if p.features.begun && p.features.wait() <= 0 {
				p.features.check(ctx)
			}
		}
	}
}

// succeeded reports that everything is stored.
func (p *Publisher) succeeded(ctx context.Context) {
	p.confirmed, p.failing = true, time.Time{}
	p.observe(len(p.known.slices), nil)
	devices := 0
	for _, slice := range p.known.slices {
		devices += len(slice.Spec.Devices)
	}
	if p.published.Set(fmt.Sprint(len(p.known.slices), devices)) {
		klog.FromContext(ctx).Info("Published", "resourceSlices", len(p.known.slices), "devices", devices)
	}
	p.report(ctx, "")
}

// failed reports an error, at first only until everything was stored once: usually
// the next attempt succeeds. An attempt may have waited long for an answer since it began.
func (p *Publisher) failed(ctx context.Context, began time.Time, err error) {
	p.observe(0, err)
	if p.failing.IsZero() {
		p.failing = began
	}
	if !p.confirmed || time.Since(p.failing) >= usualTime {
		p.report(ctx, fmt.Sprintf("the ResourceSlices are not in the API server as they should be: %v", err))
	}
}

// awaitRetry waits after a failure. Where this instance is refused for long, because it
// lacks rights, for example, an older one of this node may still be able to write.
func (p *Publisher) awaitRetry(ctx context.Context, err error, delay time.Duration) {
	changed := p.changed
	refused := apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsInvalid(err)
	if refused && time.Since(p.failing) >= usualTime && p.precedence.GiveWay() {
		klog.FromContext(ctx).Info("Letting an older instance of the plugin publish the ResourceSlices of this node", "for", giveWayTime)
		p.known, delay, changed = nil, wait.Jitter(giveWayTime, 0.5), nil
	}
	select {
	case <-ctx.Done():
	case <-changed:
	case <-time.After(delay):
	}
}

// awaitReason returns when there may be something to write. wrote says that there
// was just now.
func (p *Publisher) awaitReason(ctx context.Context, wrote bool) {
	p.repairs.done(wrote)
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.changed:
			return
		case <-time.After(p.features.wait()):
			if p.features.check(ctx) {
				return
			}
		case <-p.recheck:
			p.known, p.repairs.repairing = nil, true
			return
		case <-p.seen:
			if p.watcher.differs(p.known.slices, p.known.removed) {
				p.known = nil
				p.awaitRepair(ctx)
				return
			}
		}
	}
}

// awaitRepair waits before what others changed is put back. Who changes it again and
// again is answered ever more slowly.
func (p *Publisher) awaitRepair(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-p.changed:
	case <-time.After(wait.Jitter(changesTogether, 1) + p.repairs.begin()):
	}
}

// awaitPrecedence returns when no newer instance is left.
func (p *Publisher) awaitPrecedence(ctx context.Context) {
	logger := klog.FromContext(ctx)
	logger.Info("A newer instance of the plugin publishes the ResourceSlices of this node")
	if !p.confirmed {
		p.report(ctx, errNotMine.Error())
	}
	for loop.Pause(ctx, wait.Jitter(precedenceInterval, 0.5)) {
		if err := p.checkPrecedence(ctx); err == nil {
			logger.Info("The newer instance of the plugin has ended, publishing again")
			p.known = nil
			return
		}
	}
}

// wanted are the slices that this cluster can take.
func (p *Publisher) wanted(ctx context.Context) []resourceslice.Slice {
	inventory := p.inventory.Load()
	wanted := Resources(p.pool.driverName, p.pool.nodeName, inventory, p.features.now).Pools[p.pool.nodeName].Slices
	p.reportLeftOut(ctx, wanted)
	p.reportCrashes(ctx, wanted)
	if !p.features.noTaints {
		return wanted
	}
	for i := range wanted {
		for j := range wanted[i].Devices {
			wanted[i].Devices[j].Taints = nil
		}
	}
	return wanted
}

// Resources are the slices of an inventory in a cluster with these features.
func Resources(driverName, nodeName string, inventory *device.Inventory, f Features) resourceslice.DriverResources {
	return inventory.DriverResources(device.Options{
		Driver:               driverName,
		Pool:                 nodeName,
		NodeName:             nodeName,
		PartitionableDevices: f.PartitionableDevices,
		ConsumableCapacity:   f.ConsumableCapacity,
		NoShareCounters:      !f.ShareCounters,
		NoEffectNone:         !f.TaintEffectNone,
	})
}
