// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/neighbour"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
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
)

var neighbourReasons = map[neighbour.Kind]string{
	neighbour.DevicePlugin: reasonDevicePlugin,
	neighbour.DRADriver:    reasonOtherDriver,
	neighbour.MIGManager:   reasonMIGManager,
}

var neighbourGone = map[neighbour.Kind]string{
	neighbour.DevicePlugin: "No device plugin offers the GPUs of this node any more",
	neighbour.DRADriver:    "NVIDIA's DRA driver does not run on this node any more",
	neighbour.MIGManager:   "No MIG manager is asked to partition the GPUs of this node any more",
}

// nodeInterval is the time between two readings of the node, less up to nodeJitter: with 5,000
// nodes ten a second from the API server's cache.
const (
	nodeInterval = 10 * time.Minute
	nodeJitter   = 2 * time.Minute
)

// neighbourLoop reports what else on the node gives out or partitions its GPUs, as long as that
// lasts. Nothing else depends on it.
type neighbourLoop struct {
	node func(ctx context.Context) (*corev1.Node, error)
	// otherDriver looks for a DRA driver of the same name.
	otherDriver func(ctx context.Context) []neighbour.Software
	events      EventWriter
	observe     func(kinds []neighbour.Kind)
	interval    time.Duration

	// onNode are those that the node told when it was last read.
	onNode []neighbour.Software
	// readNode is when to read the node again.
	readNode time.Time
	unread   logchange.Problem
	reported logchange.Set[neighbour.Kind, neighbour.Software]
	// repeat is when to repeat the event of a kind.
	repeat map[neighbour.Kind]time.Time
}

// run looks now, with a node that may have been read already, and again until ctx ends.
func (l *neighbourLoop) run(ctx context.Context, node *corev1.Node) {
	for {
		l.look(ctx, node)
		if !loop.Pause(ctx, l.interval) {
			return
		}
		node = nil
	}
}

func (l *neighbourLoop) look(ctx context.Context, node *corev1.Node) {
	if now := time.Now(); node != nil || !now.Before(l.readNode) {
		var err error
		if node == nil {
			node, err = l.node(ctx)
		}
		l.unread.Log(ctx, err, "What the node says of device plugins and MIG managers is not known, or as it was", "")
		if err == nil {
			l.onNode = neighbour.OnNode(node)
		}
		l.readNode = now.Add(nodeInterval - rand.N(nodeJitter)) //nolint:gosec // no secret
	}
	l.report(ctx, slices.Concat(l.onNode, l.otherDriver(ctx)))
}

func (l *neighbourLoop) report(ctx context.Context, found []neighbour.Software) {
	logger := klog.FromContext(ctx)
	kinds := make([]neighbour.Kind, len(found))
	for i := range found {
		kinds[i] = found[i].Kind
	}
	l.observe(kinds)
	appeared, disappeared := l.reported.Update(found, func(s neighbour.Software) neighbour.Kind { return s.Kind })
	for _, s := range appeared {
		logger.Info("Something else gives out or partitions the GPUs of this node", "kind", s.Kind, "details", s.Text)
	}
	for _, s := range disappeared {
		logger.Info("Something else that gave out or partitioned the GPUs of this node is gone", "kind", s.Kind)
		l.events.Node(ctx, corev1.EventTypeNormal, reasonNeighbourGone, neighbourGone[s.Kind])
		delete(l.repeat, s.Kind)
	}
	if l.repeat == nil {
		l.repeat = map[neighbour.Kind]time.Time{}
	}
	for _, s := range found {
		if now := time.Now(); !now.Before(l.repeat[s.Kind]) {
			l.events.Node(ctx, corev1.EventTypeWarning, neighbourReasons[s.Kind], sentences(s.Text))
			l.repeat[s.Kind] = repeatAt(now)
		}
	}
}

// otherDriver looks for a DRA driver of the same name, which has the socket that this one would
// have without the UID of its pod.
func (o *Options) otherDriver(ctx context.Context) []neighbour.Software {
	if o.PodUID == "" {
		return nil
	}
	return neighbour.OtherDriver(ctx, o.RegistrarDir, o.DriverName)
}
