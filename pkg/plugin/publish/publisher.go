// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package publish keeps the ResourceSlices of a node in the API server.
//
//	publisher.go   the loop: observe, decide, act, or wait
//	rules/         what is requested first. Pure
//	want.go        the slices that there should be
//	act.go         one request, and what its answer means
//	says.go        what is said of what is stored
//	stored.go      reads what the API server has; watch.go says whether somebody else has changed it
//	features.go    what the cluster can do with devices; probe.go asks for it
//	warnings.go    what people are told of that
//
// It does not use the slice controller of k8s.io/dynamic-resource-allocation, see
// docs/design/publishing.md.
package publish

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	typedresource "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/plugin/internal/metawatch"
	"github.com/partage-dev/partage/pkg/plugin/internal/precedence"
	"github.com/partage-dev/partage/pkg/plugin/publish/rules"
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
	// usualTime is for how long slices may be other than they should be before that is
	// said of those that were right once: an API server restarts in less.
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
	// Report is called with the reason why the API server does not hold what it
	// should, and with "" when it does.
	Report func(ctx context.Context, reason string)
	// Say takes what is not offered, or dangerous, because of the cluster, by the reason of its event: nothing if it is over.
	Say func(ctx context.Context, reason, message string)
	// Observe is told after each request how many slices are stored, 0 if another
	// instance sees to that, or why it failed. Optional.
	Observe func(slices int, err error)
	// Pace is optional.
	Pace *rules.Pace
}

// Publisher publishes the ResourceSlices of one node. Its methods may be called
// concurrently, except Run.
type Publisher struct {
	pool    pool
	slices  typedresource.ResourceSliceInterface
	observe func(slices int, err error)
	pace    *rules.Pace

	// inventory is what is to be published, nil until there is one.
	inventory atomic.Pointer[device.Inventory]
	// owner is the UID of the node, empty while it is not in the cluster. It is known when nodeRead is closed.
	owner    atomic.Pointer[types.UID]
	nodeRead chan struct{}
	// recheck says that the owner has changed.
	recheck atomic.Bool
	// changed says that there is another inventory, registered that the kubelet has
	// registered the plugin, and seen that the watch has seen something.
	changed, registered, seen loop.Trigger
	watch                     metawatch.Watch
	versions                  *versions
	// listed is what Stored has found.
	listed     atomic.Pointer[listed]
	precedence *precedence.Precedence
	// notMine means that another instance publishes.
	notMine atomic.Bool

	// What follows is for the goroutine of Run.

	began             time.Time
	memory            *rules.Memory
	stored            rules.Stored
	wanted            wanted
	touched           map[types.UID]time.Time
	precedenceProblem logchange.Problem
	// givenWay is until when an older instance publishes.
	givenWay time.Time
	features features
	says     says
	// sayLacks takes what the cluster lacks, by reason.
	sayLacks func(ctx context.Context, reason, message string)
}

// New makes a Publisher that does nothing before Run.
func New(o Options) *Publisher {
	if o.Observe == nil {
		o.Observe = func(int, error) {}
	}
	if o.Pace == nil {
		o.Pace = &rules.Usual
	}
	pool := pool{driverName: o.DriverName, nodeName: o.NodeName}
	p := &Publisher{
		pool:       pool,
		slices:     o.KubeClient.ResourceV1().ResourceSlices(),
		nodeRead:   make(chan struct{}),
		says:       says{report: o.Report},
		sayLacks:   o.Say,
		observe:    o.Observe,
		pace:       o.Pace,
		changed:    loop.NewTrigger(),
		registered: loop.NewTrigger(),
		seen:       loop.NewTrigger(),
		touched:    map[types.UID]time.Time{},
		precedence: precedence.New(o.LockFile),
		features:   features{prober: prober{pool: pool, client: o.KubeClient.ResourceV1().RESTClient()}},
	}
	p.versions = &versions{changed: p.seen.Fire, events: map[types.UID]event{}}
	p.watch = metawatch.Watch{
		Client: o.MetadataClient, Resource: sliceResource, Selector: pool.selector(), Listed: p.versions.listed, Changed: p.versions.note,
	}
	return p
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
	switch before := p.owner.Swap(&uid); {
	case before == nil:
		close(p.nodeRead)
	case *before != uid:
		p.recheck.Store(true)
		p.seen.Fire()
	}
}

// Registered says that the kubelet has registered the plugin. One that has just started has
// deleted the slices of its node.
func (p *Publisher) Registered() { p.registered.Fire() }

// Newest reports whether this instance is the one that writes what all of this node would write. It asks the kernel:
// the publisher itself may have had no reason to look for long.
func (p *Publisher) Newest() bool { return !p.notMine.Load() && !p.precedence.Superseded() }

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
	watching.Go(func() { p.watch.Run(ctx) })
	defer p.precedence.End()

	p.began = time.Now()
	p.memory = rules.NewMemory(p.pace, p.now())
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
	if p.recheck.Swap(false) || p.stored.Known && p.versions.differ(p.stored.Slices, p.touched) {
		p.memory.Doubt()
	}
	if p.stored.Known && !p.features.begun {
		// Before anything is published that would be misunderstood.
		if err := p.features.begin(ctx, p.stored.Slices); err != nil {
			p.refused(ctx, err)
			return p.memory.RetryAt(), true
		}
	}
	plan := rules.Decide(p.want(ctx), &p.stored, p.memory, p.pace, p.now())
	if plan.Write != nil {
		if !plan.Published {
			p.says.wrongFor()
		}
		if plan.Write.What != rules.List && !plan.Published && p.says.right {
			klog.FromContext(ctx).Info("Publishing the ResourceSlices again: somebody else has changed them", "missing", plan.Missing, "changed", plan.Wrong)
			p.says.right = false
			p.says.published.Set("")
		}
		p.act(ctx, plan.Write)
		return 0, false
	}
	return p.says.say(ctx, &plan, p.stored.Slices, len(p.wanted.Slices), p.now()), true
}

// await waits until something may be due.
func (p *Publisher) await(ctx context.Context, next rules.Time) {
	if p.features.begun && !p.notMine.Load() {
		if p.features.wait() <= 0 {
			p.features.check(ctx)
			return
		}
		if at := p.now() + p.features.wait(); next == rules.Never || at < next {
			next = at
		}
	}
	var timer <-chan time.Time
	if wait := next - p.now(); wait > 0 {
		timer = time.After(wait)
	} else if next != rules.Never {
		return
	}
	select {
	case <-ctx.Done():
	case <-p.changed:
	case <-timer:
	case <-p.registered:
		p.memory.Registered(p.now())
	case <-p.seen:
		gather(ctx, p.changed)
	}
}

// gather waits for what others change together, or for another inventory.
func gather(ctx context.Context, changed loop.Trigger) {
	select {
	case <-ctx.Done():
	case <-changed:
	case <-time.After(jitter(changesTogether)):
	}
}

// isMine reports whether no newer instance publishes.
func (p *Publisher) isMine(ctx context.Context) bool {
	mine := false
	if !time.Now().Before(p.givenWay) {
		newest, err := p.precedence.Mine()
		// Without locks there is nothing better than to publish.
		p.precedenceProblem.Log(ctx, err, "It is not known whether a newer instance of the plugin runs, publishing as if there were none", "")
		mine = newest || err != nil
	}
	switch was := !p.notMine.Load(); {
	case mine && !was:
		p.memory.Doubt()
		klog.FromContext(ctx).Info("The newer instance of the plugin has ended, publishing again")
	case !mine && was:
		p.observe(0, nil)
		if time.Now().Before(p.givenWay) {
			break // it is said why
		}
		klog.FromContext(ctx).Info("A newer instance of the plugin publishes the ResourceSlices of this node")
		if !p.says.confirmed {
			p.says.report(ctx, "a newer instance of the plugin on this node publishes")
		}
		p.says.wrongSince = time.Time{}
	}
	p.notMine.Store(!mine)
	return mine
}

// refused takes note of a request that has failed. Where this instance is refused for long, because it lacks rights, for
// example, an older one of this node may still be able to write.
func (p *Publisher) refused(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	p.observe(0, err)
	p.says.failure = err
	p.memory.Refused(p.pace, p.now(), rand.Float64()) //nolint:gosec // no secret
	since := p.says.wrongFor()
	if p.says.confirmed && since < usualTime {
		return
	}
	p.says.report(ctx, fmt.Sprintf("the ResourceSlices are not in the API server as they should be: %v", err))
	isRefused := apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsInvalid(err)
	if isRefused && since >= usualTime && p.precedence.GiveWay() {
		klog.FromContext(ctx).Info("Letting an older instance of the plugin publish the ResourceSlices of this node", "for", giveWayTime)
		p.givenWay = time.Now().Add(jitter(giveWayTime))
	}
}

// jitter is up to one and a half times as long, so that the plugins of many nodes do not ask together.
func jitter(d time.Duration) time.Duration { return wait.Jitter(d, 0.5) }
