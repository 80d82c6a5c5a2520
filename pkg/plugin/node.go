// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// ErrStop ends Run when an error of Hardware.Open wraps it. Every other error
// of the hardware is retried for ever.
var ErrStop = errors.New("the plugin must be started anew")

// discovery is what the hardware said about the GPUs.
type discovery struct {
	node      *gpu.Node
	inventory *device.Inventory
	err       error
}

// nodeLoop follows the GPUs of this node: what they are, which takes long and
// seldom changes, and what is the case on them, which is looked up often.
type nodeLoop struct {
	*Plugin

	overview overview
	// results has room for the one discovery that may be under way. It runs by
	// itself, since a GPU that does not answer delays it.
	results     chan discovery
	discovering bool
	offer       offer

	// base and resources are what was handed on last, to claims and to publish.
	base      *device.Inventory
	resources resourceslice.DriverResources
	// problems are those of the inventory that were logged, summary and failure
	// what was logged about the last discovery.
	problems         map[string]bool
	summary, failure string
	reported         policyReport
}

func (p *Plugin) newNodeLoop() *nodeLoop {
	return &nodeLoop{
		Plugin: p, results: make(chan discovery, 1), problems: map[string]bool{},
		offer: offer{source: p.Policy, limited: p.Limited, grace: withdrawalGrace, now: time.Now},
	}
}

// run finds the GPUs, cleans up what an earlier process left, lets calls through
// and then keeps claims and publication up to date until ctx ends. Without a
// driver it cleans up what can be cleaned up and waits: unpreparing must work.
func (l *nodeLoop) run(ctx context.Context) {
	defer l.settle()
	l.recall(ctx)
	l.take(ctx, l.discover(ctx))
	l.reconcileFirst(ctx)
	// Claims can have partitions that others made, which only a survey finds.
	l.survey(ctx)
	l.settle()
	l.background.Go(func() { l.reconcileForEver(ctx) })

	ticker := time.NewTicker(l.PollInterval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case found := <-l.results:
			l.discovering = false
			l.takeLater(ctx, found)
			l.survey(ctx)
		case <-ticker.C:
			l.lookAround(ctx)
		case <-l.look:
			l.lookAround(ctx)
		}
	}
}

// lookAround sees whether something else is to be offered, surveys the GPUs, and
// starts a discovery if that is due.
func (l *nodeLoop) lookAround(ctx context.Context) {
	l.recall(ctx)
	l.revise(ctx)
	l.survey(ctx)
	if l.overview.due() && !l.discovering {
		l.discovering = true
		l.background.Go(func() { l.results <- l.discover(ctx) })
	}
}

// discover reads everything about all GPUs. It takes as long as the hardware
// does, and ends soon when ctx does.
func (p *Plugin) discover(ctx context.Context) discovery {
	if err := p.Hardware.Open(ctx); err != nil {
		return discovery{err: err}
	}
	node, err := p.Hardware.Discover(ctx)
	if err != nil {
		return discovery{err: fmt.Errorf("discover the GPUs: %w", err)}
	}
	return discovery{node: node}
}

// takeLater also cleans up when the driver has come (back): what was left while
// it was away can be removed now.
func (l *nodeLoop) takeLater(ctx context.Context, found discovery) {
	appeared, returned := l.overview.inventory == nil, l.overview.gone != nil
	l.take(ctx, found)
	switch {
	case found.err != nil:
	case appeared:
		l.reconcileFirst(ctx)
	case returned:
		signal(l.failed)
	}
}

// take hands the result of a discovery on.
func (l *nodeLoop) take(ctx context.Context, found discovery) {
	if errors.Is(found.err, ErrStop) {
		l.fatal(found.err)
		return
	}
	if ctx.Err() != nil {
		return
	}
	l.readPolicy(ctx)
	l.noteWanted(ctx)
	if found.err == nil {
		found.inventory, found.err = l.build(found.node)
	}
	l.overview.discovered(found)
	switch {
	case found.err == nil:
		l.report(ctx, found)
		l.reportPolicy(ctx)
		l.Claims.SetInventory(l.overview.inventory.With(l.overview.status()))
		l.ready.setHardware(ctx, "")
	case l.overview.inventory == nil, l.overview.gone != nil:
		l.ready.setHardware(ctx, found.err.Error())
	case l.failure != found.err.Error():
		l.failure = found.err.Error()
		klog.FromContext(ctx).Error(found.err, "The GPUs could not be discovered anew, will try again")
	}
}

// survey looks what is the case on the GPUs, and hands it on if it has changed.
func (l *nodeLoop) survey(ctx context.Context) {
	if l.overview.inventory == nil || ctx.Err() != nil {
		return
	}
	status := l.Claims.Survey(ctx)
	if ctx.Err() != nil {
		return
	}
	l.overview.survey(status)
	status = l.overview.status()
	l.tell(ctx, status)

	now := l.overview.inventory.With(status)
	resources := now.DriverResources(l.deviceOptions(true, true))
	changed := !apiequality.Semantic.DeepEqual(resources, l.resources)
	if changed || l.base != l.overview.inventory {
		l.Claims.SetInventory(now)
	}
	l.base = l.overview.inventory
	if changed && l.offer.known() {
		l.resources = resources
		l.inventory.Store(now)
		signal(l.republish)
	}
}

// report logs what a discovery found where it is not what the last one found.
func (l *nodeLoop) report(ctx context.Context, found discovery) {
	l.reportProblems(ctx, found.inventory)
	l.failure = ""
	devices := len(l.overview.inventory.Devices())
	summary := fmt.Sprint(len(found.node.GPUs), devices, found.node.DriverVersion)
	if summary != l.summary {
		l.summary = summary
		klog.FromContext(ctx).Info("Discovered", "gpus", len(found.node.GPUs), "devices", devices, "driverVersion", found.node.DriverVersion)
	}
}

// deviceOptions say how devices are published.
func (p *Plugin) deviceOptions(partitionable, consumable bool) device.Options {
	return device.Options{
		Driver:               p.DriverName,
		Pool:                 p.NodeName,
		NodeName:             p.NodeName,
		PartitionableDevices: partitionable,
		ConsumableCapacity:   consumable,
	}
}

func (l *nodeLoop) reportProblems(ctx context.Context, inventory *device.Inventory) {
	problems := map[string]bool{}
	for _, problem := range inventory.Problems() {
		problems[problem.Error()] = true
		if !l.problems[problem.Error()] {
			klog.FromContext(ctx).Error(problem, "Not everything can be published")
		}
	}
	l.problems = problems
}
