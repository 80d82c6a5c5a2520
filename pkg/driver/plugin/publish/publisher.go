// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package publish keeps the ResourceSlices of a node in the API server.
//
//	publisher.go   the loop: decide, act, or wait
//	rules/         what is requested first. Pure
//	want.go        the slices that there should be
//	act.go         one request, and what its answer means
//	versions.go    whether somebody else has changed what is stored
//	report.go      reports whether the slices are stored as they should be, and which of several instances publishes
//	features.go    finds out what the cluster can do with devices, with events about what it cannot
//
// It does not use the slice controller of k8s.io/dynamic-resource-allocation, see
// docs/design/publishing.md.
package publish

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	typedresource "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/precedence"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish/rules"
)

const (
	// changesTogether is the time in which changes by others count as one: slices
	// are deleted several at a time. Meanwhile the watch delivers the writes of this process that were answered.
	changesTogether = 400 * time.Millisecond
	// precedenceInterval is the time between two checks whether a newer instance still
	// runs. They ask only the kernel.
	precedenceInterval = 2 * time.Second
	// requestTimeout bounds one request. An API server may be slow, but not for ever.
	requestTimeout = 30 * time.Second
)

// Options are all mandatory except where a comment says otherwise.
type Options struct {
	DriverName string
	// NodeName is the node's name and the name of its only pool.
	NodeName   string
	KubeClient kubernetes.Interface
	// MetadataClient watches the slices.
	MetadataClient metadata.Interface
	// LockFile makes one of several instances on this node publish.
	LockFile string
	// Report is called with the reason why the API server does not hold what it
	// should, and with "" when it does.
	Report func(ctx context.Context, reason string)
	// Say takes the message of an event about what the cluster lacks, by the reason of the event. It is empty when that is over.
	Say func(ctx context.Context, reason, message string)
	// Observe is called after each request with the number of slices that are stored, or why
	// it failed. The number is 0 while another instance publishes.
	Observe func(slices int, err error)
	// Pace is optional.
	Pace *rules.Pace
}

// Publisher publishes the ResourceSlices of one node. Its methods may be called
// concurrently, except Run.
type Publisher struct {
	Options
	pool   pool
	slices typedresource.ResourceSliceInterface

	// inventory is what is to be published, nil until there is one.
	inventory atomic.Pointer[device.Inventory]
	// owner is the UID of the node, empty while it is not in the cluster, or was not read.
	owner atomic.Value
	// changed says that there is another inventory or owner, registered that the kubelet has
	// registered the plugin.
	changed, registered loop.Trigger
	versions            *versions
	precedence          *precedence.Precedence
	// found is the list that Stored has read, until it is used. It may be out of date: requests have the resource versions that they
	// replace, and the watch begins with a list.
	found atomic.Pointer[resourceapi.ResourceSliceList]

	// What follows is for the goroutine of Run.

	began time.Time
	// notMine means that another instance publishes.
	notMine bool
	// compareAt is when the versions of the watch are compared with those known to be stored, or zero if the watch has no news.
	compareAt time.Time
	memory    *rules.Memory
	stored    rules.Stored
	wanted    wanted
	features  features
	reporting reporting
}

// New makes a Publisher that does nothing before Run.
func New(o Options) *Publisher {
	if o.Pace == nil {
		o.Pace = &rules.Usual
	}
	pool := pool{driverName: o.DriverName, nodeName: o.NodeName}
	return &Publisher{
		Options:    o,
		pool:       pool,
		slices:     o.KubeClient.ResourceV1().ResourceSlices(),
		changed:    loop.NewTrigger(),
		registered: loop.NewTrigger(),
		versions:   newVersions(o.MetadataClient, pool),
		precedence: precedence.New(o.LockFile),
		memory:     rules.NewMemory(o.Pace),
		features:   features{pool: pool, client: o.KubeClient.ResourceV1().RESTClient()},
	}
}

// SetInventory replaces what is to be published.
func (p *Publisher) SetInventory(inventory *device.Inventory) {
	if p.inventory.Swap(inventory) != inventory {
		p.changed.Fire()
	}
}

// SetOwner says which object the node is, by its UID, or that it is not in the cluster. Nothing is published before. The
// garbage collector deletes what a node owned that was deleted.
func (p *Publisher) SetOwner(uid types.UID) {
	if p.owner.Swap(uid) != uid {
		p.changed.Fire()
	}
}

// Registered says that the kubelet has registered the plugin. One that has just started has
// deleted the slices of its node.
func (p *Publisher) Registered() { p.registered.Fire() }

// Newest reports whether this is the newest instance on the node, which alone writes. It asks the kernel, as the
// publisher's own last check may be long ago.
func (p *Publisher) Newest() bool { return !p.precedence.Superseded() }

// Stored returns all slices of this driver on this node that the API server holds,
// of all generations and whichever instance published them. They must not be modified.
func (p *Publisher) Stored(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := p.list(ctx)
	if err != nil {
		return nil, err
	}
	p.found.Store(list)
	return list.Items, nil
}

// Run keeps the slices in the API server until ctx ends, once there is an inventory.
func (p *Publisher) Run(ctx context.Context) {
	for p.inventory.Load() == nil {
		select {
		case <-ctx.Done():
			return
		case <-p.changed:
		}
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watching.Go(func() { p.versions.watch.Run(ctx) })
	defer p.precedence.End()

	p.began = time.Now()
	for ctx.Err() == nil {
		if next, wait := p.step(ctx); wait {
			p.await(ctx, next)
		}
	}
}

// now is the time of the rules.
func (p *Publisher) now() rules.Time { return time.Since(p.began) }

// step carries out the first request that is due. If none is it returns when one may be.
func (p *Publisher) step(ctx context.Context) (next rules.Time, wait bool) {
	if !p.isMine(ctx) {
		p.stored = rules.Stored{}
		return p.now() + jitter(precedenceInterval), true
	}
	if p.stored.Known && !p.features.known {
		if err := p.features.check(ctx, p.stored.Slices); err != nil {
			p.refused(ctx, err)
			return p.report(ctx, &rules.Plan{Next: p.memory.RetryAt()}), true
		}
	}
	plan := rules.Decide(p.want(ctx), &p.stored, p.memory, p.now())
	if plan.ChangedByOthers && p.reporting.published.Set("") {
		klog.FromContext(ctx).Info("Publishing the ResourceSlices again: somebody else has changed them", "missing", plan.Missing, "changed", plan.Wrong)
	}
	if plan.Request != nil && plan.Request.Verb == rules.Put && p.wanted.Owner == "" {
		plan.Request, p.reporting.failure = nil, fmt.Errorf("node %s is not in the cluster, as far as is known", p.pool.nodeName)
	}
	switch {
	case plan.Request != nil:
		p.reporting.note(plan.Published)
		p.act(ctx, plan.Request)
		return 0, false
	case p.features.due():
		if err := p.features.check(ctx, p.stored.Slices); err != nil {
			klog.FromContext(ctx).V(2).Info("Could not ask the API server which features it has, will retry", "err", err)
		}
		return 0, false
	}
	return p.report(ctx, &plan), true
}

// await waits until something may be due.
func (p *Publisher) await(ctx context.Context, next rules.Time) {
	if p.features.known && !p.notMine {
		next = min(next, p.now()+time.Until(p.features.next))
	}
	if !p.compareAt.IsZero() {
		next = min(next, p.now()+time.Until(p.compareAt))
	}
	select {
	case <-ctx.Done():
	case <-p.changed:
	case <-time.After(next - p.now()):
	case <-p.registered:
		p.memory.Registered()
	case <-p.versions.changed:
		if p.compareAt.IsZero() {
			p.compareAt = time.Now().Add(jitter(changesTogether))
		}
	}
	if !p.compareAt.IsZero() && !time.Now().Before(p.compareAt) {
		p.compareAt = time.Time{}
		if p.versions.differ(p.stored.Slices) {
			p.memory.Reread()
		}
	}
}

// jitter is up to one and a half times as long, so that the plugins of many nodes do not ask together.
func jitter(d time.Duration) time.Duration { return wait.Jitter(d, 0.5) }
