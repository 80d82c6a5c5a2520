// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/health"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// healthMonitor knows what is wrong with GPUs that answer, and what was, a short time ago,
// with others.
type healthMonitor interface {
	// Follow says which GPUs there are, by PCI address and UUID, and how to react.
	Follow(uuids map[string]string, reaction policy.Health)
	Conditions() []device.Condition
	// Run follows them until ctx ends.
	Run(ctx context.Context)
}

// newMonitor makes what follows the health of GPUs.
func (p *Plugin) newMonitor() *health.Monitor {
	o := p.options
	return health.New(health.Options{
		Hardware: o.Health, DataDir: o.DataDir, BootID: o.BootID, Interval: o.PollInterval,
		Changed: p.pollNow.Fire, Report: p.reportProgramError, HeldBack: p.reportHeldBack, ObserveHealth: o.Metrics.SetHealth,
		ObserveEvent: func(e gpu.Event) {
			if e.Kind == gpu.EventXID {
				o.Metrics.XID(e.PCIAddress, e.XID)
			}
		},
	})
}

// reasonProgramError is the reason of an event of claims and pods.
const reasonProgramError = "GPUProgramError"

// reportProgramError tells those who may have the program. Where they share a GPU it is not
// known whose it is.
func (p *Plugin) reportProgramError(ctx context.Context, e health.ProgramError) {
	live, err := p.options.Claims.Live()
	if err != nil {
		klog.FromContext(ctx).Error(err, "An error of a program cannot be reported to those who use the GPU", "pciAddress", e.PCIAddress, "error", e.Text)
		return
	}
	on := device.Condition{PCIAddress: e.PCIAddress, Where: e.Place, Exact: e.Place != nil}
	var all []events.Event
	for _, l := range live {
		at := slices.IndexFunc(l.Devices, func(d claim.LiveDevice) bool { return !d.Admin && concerns(on, &d) })
		if at >= 0 {
			all = append(all, events.Event{
				Claim: l.Claim, Reason: reasonProgramError, Subjects: []string{l.Devices[at].Device},
				Text: sentences("a program on it, of this pod or of one that shares the device, had an error: "+e.Text, "The device is in order"),
			})
		}
	}
	p.options.Events(ctx, all...)
}

// reasonHeldBack is the reason of an event of the node.
const reasonHeldBack = "GPUHeldBack"

// reportHeldBack says why a GPU that works again is still tainted.
func (p *Plugin) reportHeldBack(ctx context.Context, h health.Hold) {
	text := fmt.Sprintf("%s, but not for the first time (%d before, at most a week ago). It is offered again at %s if nothing happens until then.",
		h.Reason.Over(), h.Earlier, h.Until.UTC().Format(time.RFC3339))
	klog.FromContext(ctx).Info("A GPU is held back", "pciAddress", h.PCIAddress, "details", text)
	p.options.Events(ctx, events.Event{Reason: reasonHeldBack, Subjects: []string{h.PCIAddress}, Text: text})
}
