// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/nodelabels"
)

// reasonForeignLabels is the reason of an event.
const reasonForeignLabels = "NodeLabelsOfOthers"

func newLabels(o *Options) *nodelabels.Writer {
	return nodelabels.New(nodelabels.Options{
		NodeName: o.NodeName, Client: o.LabelClient, Mode: o.NodeLabels,
		Warn: func(ctx context.Context, message string) {
			o.Events.Tell(ctx, events.Event{Reason: reasonForeignLabels, Text: message})
		},
	})
}

// seeNode hands on what the API server says of this node.
func (p *Plugin) seeNode(node *metav1.PartialObjectMetadata) {
	p.publisher.SetOwner(node.UID)
	p.labels.SetNode(node.UID, node.Labels)
}

// publish replaces what is published, and which GPUs the labels of the node are about: those that have devices which
// are not withdrawn. A GPU that is broken at the moment is among them: its devices are tainted.
func (p *Plugin) publish(inventory *device.Inventory) {
	withdrawn := sets.New(inventory.Withdrawn()...)
	var gpus []*gpu.GPU
	for _, d := range inventory.Devices() {
		if !withdrawn.Has(d.Name) && (len(gpus) == 0 || gpus[len(gpus)-1] != d.GPU) {
			gpus = append(gpus, d.GPU)
		}
	}
	p.labels.SetGPUs(gpus)
	p.publisher.SetInventory(inventory)
}
