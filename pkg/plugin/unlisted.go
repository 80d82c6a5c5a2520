// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/plugin/events"
)

// reasonUnlisted is the reason of an event.
const reasonUnlisted = "GPUNotListed"

const unlistedText = "it is on the PCI bus, and the NVIDIA driver does not list it, so that it is not offered. " +
	"See what the kernel log (NVRM) says about it, and whether its kernel driver is nvidia (lspci -k). " +
	"If the GPU is not to be used here, bind it to vfio-pci or take it out."

// sayUnlisted says which GPUs the driver does not list: of those that it has never listed nothing else would tell. A GPU that
// was listed before has a condition.
func (l *gpuLoop) sayUnlisted(ctx context.Context, pciAddresses []string) {
	var never []events.Statement
	for _, address := range pciAddresses {
		if !l.state.known.Has(address) {
			never = append(never, events.Statement{Key: address, Event: events.Event{Reason: reasonUnlisted, Subjects: []string{address}, Text: unlistedText}})
		}
	}
	l.board.Say(ctx, "unlisted GPUs", never, func(was events.Statement) (events.Event, bool) {
		return events.Event{
			Type: corev1.EventTypeNormal, Reason: recoveryReason(device.Lost), Subjects: was.Subjects,
			Text: "the NVIDIA driver lists it now, or it is not on the PCI bus any more.",
		}, !slices.Contains(pciAddresses, was.Subjects[0])
	})
}
