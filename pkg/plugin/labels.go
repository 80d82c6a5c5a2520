// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/nodelabels"
)

// reasonForeignLabels is the reason of an event.
const reasonForeignLabels = "NodeLabelsOfOthers"

// newLabels returns nil where the labels of the node are to be left alone.
func newLabels(o *Options) *nodelabels.Writer {
	if o.NodeLabels == "" || o.NodeLabels == nodelabels.Never {
		return nil
	}
	return nodelabels.New(nodelabels.Options{
		NodeName: o.NodeName, Client: o.LabelClient, Mode: o.NodeLabels,
		Warn: func(ctx context.Context, message string) {
			o.Events.Tell(ctx, events.Event{Reason: reasonForeignLabels, Text: message})
		},
	})
}

// labelling hands on what is published, and which GPUs it is of.
type labelling struct {
	publisher interface{ SetInventory(*device.Inventory) }
	labels    *nodelabels.Writer
}

// SetInventory replaces what is published.
func (l labelling) SetInventory(inventory *device.Inventory) {
	if l.labels != nil {
		l.labels.Set(offeredGPUs(inventory))
	}
	l.publisher.SetInventory(inventory)
}

// offeredGPUs are those that have devices which are not withdrawn, in the order of their
// addresses. A GPU that is broken at the moment is among them: its devices are tainted.
func offeredGPUs(inventory *device.Inventory) []*gpu.GPU {
	withdrawn := sets.New(inventory.Withdrawn()...)
	var gpus []*gpu.GPU
	for _, d := range inventory.Devices() {
		if !withdrawn.Has(d.Name) && (len(gpus) == 0 || gpus[len(gpus)-1] != d.GPU) {
			gpus = append(gpus, d.GPU)
		}
	}
	return gpus
}
