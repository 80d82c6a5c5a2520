// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// Reasons of events: whether pods can have devices of the node by an extended resource, such as nvidia.com/gpu.
const (
	reasonExtendedOff = "ExtendedResourcesOff"
	reasonExtendedOn  = "ExtendedResourcesOn"
)

// kubelet is what is known of the kubelet of this node. One that is too old starts a pod that asks for an extended
// resource without the device that the scheduler has allocated for it. So its devices are published for claims only,
// and so are those of a kubelet whose version is not known.
type kubelet struct {
	board   *events.Board
	observe func(knows *bool)
	// changed is fired when other devices are to be published.
	changed loop.Trigger

	mu sync.Mutex
	// looked says that the node was read, knows that its kubelet knows extended resources.
	looked, knows bool
}

// look takes the node.
func (k *kubelet) look(ctx context.Context, node *corev1.Node) {
	knows, err := device.KnowsExtendedResources(node.Status.NodeInfo.KubeletVersion)
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.looked || k.knows != knows {
		k.looked, k.knows = true, knows
		k.changed.Fire()
	}
	text := ""
	switch {
	case err != nil:
		text = fmt.Sprintf("It is not known whether the kubelet gives pods devices for extended resources of device classes, such as nvidia.com/gpu, "+
			"so that devices of this node are for claims only (%v).", err)
		k.observe(nil)
	case !knows:
		text = fmt.Sprintf("The kubelet %s would start pods that ask for extended resources of device classes, such as nvidia.com/gpu, without a device, "+
			"so that devices of this node are for claims only. Upgrade the kubelet to 1.36 or later.", node.Status.NodeInfo.KubeletVersion)
		k.observe(&knows)
	default:
		k.observe(&knows)
	}
	var off []events.Statement
	if text != "" {
		off = []events.Statement{{Event: events.Event{Type: corev1.EventTypeNormal, Reason: reasonExtendedOff, Text: text}}}
	}
	k.board.Say(ctx, "extended resources", off, func(events.Statement) (events.Event, bool) {
		return events.Event{
			Type: corev1.EventTypeNormal, Reason: reasonExtendedOn,
			Text: "The kubelet gives pods devices for extended resources of device classes, such as nvidia.com/gpu.",
		}, text == ""
	})
}

// known reports whether the node was read. To publish before would take away what an earlier process of the plugin has
// published.
func (k *kubelet) known() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.looked
}

func (k *kubelet) knowsExtendedResources() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.knows
}
