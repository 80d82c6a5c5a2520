// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/unclaimed"
)

// Reasons of events about the node.
const (
	// A device plugin offers the GPUs of the node, too.
	reasonDevicePlugin = "DevicePluginOnNode"
	// NVIDIA's DRA driver, which has the same name, runs on the node, too.
	reasonOtherDriver = "OtherDRADriverOnNode"
	// A MIG manager is asked to partition the GPUs of the node.
	reasonMIGManager = "MIGManagerOnNode"
	// One of these is gone.
	reasonNeighbourGone = "NeighbourGone"
	// NVIDIA's container runtime gives containers GPUs without a claim, or does not any more.
	reasonExposed    = "GPUsWithoutClaims"
	reasonNotExposed = "GPUsOnlyWithClaims"
)

var neighbourReasons = map[unclaimed.Kind]string{
	unclaimed.DevicePlugin:     reasonDevicePlugin,
	unclaimed.DRADriver:        reasonOtherDriver,
	unclaimed.MIGManager:       reasonMIGManager,
	unclaimed.ContainerRuntime: reasonExposed,
}

var goneReasons = map[unclaimed.Kind]string{
	unclaimed.DevicePlugin:     reasonNeighbourGone,
	unclaimed.DRADriver:        reasonNeighbourGone,
	unclaimed.MIGManager:       reasonNeighbourGone,
	unclaimed.ContainerRuntime: reasonNotExposed,
}

// nodeInterval is the time between two readings of the node, less up to nodeJitter: with 5,000
// nodes ten a second from the API server's cache.
const (
	nodeInterval = 10 * time.Minute
	nodeJitter   = 2 * time.Minute
	// statusTime is enough for a kubelet that has started to tell its version in the status of the node.
	statusTime = time.Minute
)

// RuntimeCheck finds out what containers can have without a claim, given the handlers of the node's container runtime.
type RuntimeCheck func(handlers []string) (unclaimed.Access, error)

// neighbourLoop reports what else on the node gives out or partitions its GPUs, as long as that
// lasts, and reads the node for others. What could not be looked at stays as it was.
type neighbourLoop struct {
	node func(ctx context.Context) (*corev1.Node, error)
	// otherDriver looks for a DRA driver of the same name, and runtime at NVIDIA's container runtime. They are optional.
	otherDriver func(ctx context.Context) unclaimed.Finding
	runtime     RuntimeCheck
	board       *events.Board
	observe     func(kind string, there *bool)
	interval    time.Duration
	// seen takes the node whenever it is read again. Optional.
	seen func(ctx context.Context, node *corev1.Node)
	// known says that the kubelet has registered the plugin, restarted that it has done so again: its version may be another one.
	known     atomic.Bool
	restarted loop.Trigger

	// readNode is when to read the node again, soon that it is to be sooner than usual.
	readNode        time.Time
	soon            bool
	unread, unknown logchange.Problem
}

// run looks now, with a node that may have been read already, and again until ctx ends.
func (l *neighbourLoop) run(ctx context.Context, node *corev1.Node) {
	for {
		l.look(ctx, node)
		node = nil
		select {
		case <-ctx.Done():
			return
		case <-l.restarted:
			l.readNode, l.soon = time.Time{}, true
		case <-time.After(l.interval):
		}
	}
}

// registered says that the kubelet has registered the plugin.
func (l *neighbourLoop) registered() {
	if l.known.Swap(true) {
		l.restarted.Fire()
	}
}

func (l *neighbourLoop) look(ctx context.Context, node *corev1.Node) {
	if l.otherDriver != nil {
		l.report(ctx, l.otherDriver(ctx))
	}
	now := time.Now()
	if node == nil && now.Before(l.readNode) {
		return
	}
	l.readNode = now.Add(nodeInterval - rand.N(nodeJitter)) //nolint:gosec // no secret
	if l.soon {
		l.readNode, l.soon = now.Add(statusTime), false
	}
	var err error
	if node == nil {
		node, err = l.node(ctx)
	}
	l.unread.Log(ctx, err, "What the node says of device plugins, MIG managers and handlers of its container runtime is not known, or as it was", "")
	if err != nil {
		l.readNode = now // again the next time
		return
	}
	if l.seen != nil {
		l.seen(ctx, node)
	}
	l.report(ctx, unclaimed.OnNode(node)...)
	if l.runtime == nil {
		return
	}
	access, err := l.runtime(unclaimed.Handlers(node))
	l.unknown.Log(ctx, err, "It is not known whether containers without a claim can have GPUs", "")
	if err != nil {
		l.observe(string(unclaimed.ContainerRuntime), nil)
	} else {
		l.report(ctx, unclaimed.Finding{Kind: unclaimed.ContainerRuntime, There: access.Open(), Text: access.Text()})
	}
}

// report says what is there.
func (l *neighbourLoop) report(ctx context.Context, found ...unclaimed.Finding) {
	for _, f := range found {
		l.observe(string(f.Kind), &f.There)
		var there []events.Statement
		if f.There {
			there = []events.Statement{{Key: f.Kind, Event: events.Event{Reason: neighbourReasons[f.Kind], Text: sentences(f.Text)}}}
		}
		l.board.Say(ctx, "neighbour "+string(f.Kind), there, func(events.Statement) (events.Event, bool) {
			return events.Event{Type: corev1.EventTypeNormal, Reason: goneReasons[f.Kind], Text: sentences(f.Text)}, true
		})
	}
}

// otherDriver looks for a DRA driver of the same name, which has the socket that this one would
// have without the UID of its pod.
func (o *Options) otherDriver() func(ctx context.Context) unclaimed.Finding {
	if o.PodUID == "" {
		return nil
	}
	return func(ctx context.Context) unclaimed.Finding {
		return unclaimed.OtherDriver(ctx, o.RegistrarDir, o.DriverName)
	}
}
