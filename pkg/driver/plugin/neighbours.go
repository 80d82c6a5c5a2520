// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/driver/unclaimed"
	"github.com/partage-dev/partage/pkg/util/logchange"
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

// RuntimeCheck finds out what containers can have without a claim, given the handlers of the node's container runtime.
type RuntimeCheck func(handlers []string) (unclaimed.Access, error)

// neighbours finds out what else on the node gives out or partitions its GPUs.
type neighbours struct {
	// node is nil as long as it was not read.
	node func() *corev1.Node
	// otherDriver looks for a DRA driver of the same name, and runtime at NVIDIA's container runtime. They are optional.
	otherDriver func(ctx context.Context) unclaimed.Finding
	runtime     RuntimeCheck
	observe     func(kind string, there *bool)

	unknown logchange.Problem
}

// find leaves out what could not be looked at.
func (n *neighbours) find(ctx context.Context) (found []unclaimed.Finding) {
	if n.otherDriver != nil {
		found = append(found, n.otherDriver(ctx))
	}
	node := n.node()
	if node != nil {
		found = append(found, unclaimed.OnNode(node)...)
	}
	if node != nil && n.runtime != nil {
		access, err := n.runtime(unclaimed.Handlers(node))
		n.unknown.Log(ctx, err, "It is not known whether containers without a claim can have GPUs", "")
		if err == nil {
			found = append(found, unclaimed.Finding{Kind: unclaimed.ContainerRuntime, There: access.Open(), Text: access.Text()})
		} else {
			n.observe(string(unclaimed.ContainerRuntime), nil)
		}
	}
	for i := range found {
		n.observe(string(found[i].Kind), &found[i].There)
	}
	return found
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
