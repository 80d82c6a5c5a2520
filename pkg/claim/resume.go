// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/step"
)

// resume finds out what an earlier call has left. A preparation of other devices is
// undone first.
func (p *preparation) resume(ctx context.Context) error {
	want := p.plan.Record
	r, err := p.load(ctx, want.Claim.UID)
	var corrupt *CorruptError
	if err != nil && !errors.As(err, &corrupt) {
		return err
	}
	quarantined, err := p.store.Quarantined(want.Claim.UID)
	if err != nil {
		return err
	}
	// What the damaged record said follows from the allocation as well.
	p.doubtful = len(quarantined) > 0
	switch {
	case r == nil:
		return nil
	case r.BootID != want.BootID:
		if r.State == journal.Prepared && r.Clone().Arrange(want) {
			// It gets its shares again, whatever the policy says by now.
			p.plan.MaxShares = nil
		}
		return nil
	case r.State == journal.Prepared && r.Arrange(want):
		p.earlier = r.Clone()
		p.begin(r)
		return nil
	case r.State == journal.Preparing && resumable(r, want):
		p.begin(r)
		return nil
	}
	if r.State != journal.Unpreparing {
		klog.FromContext(ctx).Info("The claim was prepared for other devices, they are released first")
	}
	if err := p.release(ctx, r); err != nil {
		return fmt.Errorf("release what the claim had before: %w", err)
	}
	return nil
}

// resumable reports whether a preparation can be continued: what was written down is a part
// of what is wanted now, by whole groups, shared in the same way.
func resumable(r, want *journal.Record) bool {
	return r.PartOf(want) && !split(step.Groups(want), r) && sameSharing(r, want)
}

// begin goes on with what an earlier attempt has written down.
func (p *preparation) begin(earlier *journal.Record) {
	p.start = p.plan.Record.Clone()
	p.start.Resume(earlier)
	for i := range earlier.Devices {
		p.known = append(p.known, earlier.Devices[i].Key())
	}
}

// split reports whether a record has some of a group's devices and not all.
func split(groups []step.Group, r *journal.Record) bool {
	return slices.ContainsFunc(groups, func(g step.Group) bool {
		found := 0
		for i := range g.Part.Devices {
			if r.Device(g.Part.Devices[i].Key()) != nil {
				found++
			}
		}
		return found != 0 && found != len(g.Part.Devices)
	})
}

// begun returns what the journal has of a group, or nil, and what of it may be there.
func (p *preparation) begun(i int) (*journal.Record, step.Attempt) {
	part := p.journal.part(i)
	switch {
	case part != nil && p.earlier != nil:
		return part, step.Repeated
	case part != nil || p.doubtful && !p.undone[i]:
		return part, step.Resumed
	}
	return nil, step.First
}

// sameSharing reports whether a record says that devices are shared as the plan wants it:
// what was undone of it is not in the record any more.
func sameSharing(r, want *journal.Record) bool {
	for i := range r.Devices {
		d := &r.Devices[i]
		planned := want.Device(d.Key())
		if planned == nil || d.Limited() != planned.Limited() || session(d) != session(planned) {
			return false
		}
	}
	return true
}

func session(d *journal.Device) string {
	if d.Sharing == nil {
		return ""
	}
	return d.Sharing.Session
}
