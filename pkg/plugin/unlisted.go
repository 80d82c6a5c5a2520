// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
)

// reasonUnlisted is the reason of an event.
const reasonUnlisted = "GPUNotListed"

const unlistedText = "it is on the PCI bus, and the NVIDIA driver does not list it, so that it is not offered. " +
	"See what the kernel log (NVRM) says about it, and whether its kernel driver is nvidia (lspci -k). " +
	"If the GPU is not to be used here, bind it to vfio-pci or take it out"

// reportUnlisted tells which GPUs the driver does not list, as long as that lasts: of those
// that it has never listed nothing else would tell. A GPU that was listed before has a
// condition.
func (l *gpuLoop) reportUnlisted(ctx context.Context, pciAddresses []string) {
	var never []string
	for _, address := range pciAddresses {
		if !l.state.known.Has(address) {
			never = append(never, address)
		}
	}
	for address := range l.unlisted {
		if !slices.Contains(never, address) {
			klog.FromContext(ctx).Info("A GPU is listed by the NVIDIA driver now, or is not on the PCI bus any more", "pciAddress", address)
			l.desired.events.GPU(ctx, []string{address}, corev1.EventTypeNormal, recoveryReason(device.Lost),
				"GPU "+address+": the NVIDIA driver lists it now, or it is not on the PCI bus any more.")
		}
	}
	l.unlisted.report(l.desired.now(), never, func(address string) {
		klog.FromContext(ctx).Info("A GPU is on the PCI bus and not listed by the NVIDIA driver", "pciAddress", address)
		l.desired.events.GPU(ctx, []string{address}, corev1.EventTypeWarning, reasonUnlisted, sentences("GPU "+address+": "+unlistedText))
	})
}

// lasting are things that are told when they begin, and again as long as they last. Each has
// the time when to repeat it.
type lasting map[string]time.Time

// report takes what there is now and tells what is new or to be repeated.
func (l *lasting) report(now time.Time, all []string, tell func(string)) {
	next := lasting{}
	for _, one := range all {
		at, told := (*l)[one]
		if !told || !now.Before(at) {
			tell(one)
			at = repeatAt(now)
		}
		next[one] = at
	}
	*l = next
}
