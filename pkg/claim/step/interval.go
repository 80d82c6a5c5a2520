// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/sharing"
)

// interval is the time slice of a whole GPU. The first share sets it, the last one
// resets it.
type interval struct {
	*Kit
	key string
}

func (interval) Check(*Scene) error { return nil }

func (e interval) Apply(ctx context.Context, s *Scene) error {
	d := s.Record.Device(e.key)
	isSet := slices.ContainsFunc(d.Sharers(s.Others.Records), func(h journal.Held) bool {
		return h.Record.State == journal.Prepared && h.Interval() == d.Interval()
	})
	if isSet {
		return nil
	}
	err := e.Sharing.SetInterval(ctx, sharing.Device{PCIAddress: d.PCIAddress, UUID: d.Sharing.UUID}, d.Interval())
	if refused(err) {
		return notBegun(err)
	}
	return err
}

// refused reports whether no time slice can be set, so that there is none to be reset.
func refused(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, gpu.ErrNoPermission) ||
		errors.Is(err, gpu.ErrNotSupported) || errors.Is(err, gpu.ErrInvalid)
}

// ErrNoProgram means that there is nothing to set a time slice with.
var ErrNoProgram = errors.New("the driver's program is missing")

// Undo gives the GPU back its time slice when nobody needs another one. A share that has
// not asked for one does not mind.
func (e interval) Undo(ctx context.Context, s *Scene) error {
	d := s.Record.Device(e.key)
	if slices.ContainsFunc(d.Sharers(s.Others.Holders()), func(h journal.Held) bool { return h.Interval() != "" }) {
		return nil
	}
	err := e.Sharing.SetInterval(ctx, sharing.Device{PCIAddress: d.PCIAddress, UUID: d.Sharing.UUID}, policy.IntervalDefault)
	if errors.Is(err, gpu.ErrNotSupported) {
		klog.FromContext(ctx).Info("The driver does not know time slices any more, so that none has to be reset", "pciAddress", d.PCIAddress, "reason", err)
		return nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		// nvidia-smi goes with the driver, and comes back with it.
		return fmt.Errorf("%w: %w", ErrNoProgram, err)
	}
	return err
}

func (e interval) Forget(r *journal.Record) {
	if d := r.Device(e.key); d != nil {
		d.DropInterval()
	}
}

// KeepIntervals takes over what the first share of a GPU has set, or has left alone,
// whatever the policy says by now: there is one time slice for all of them.
func KeepIntervals(r *journal.Record, others *journal.Snapshot) {
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Type != device.TimeSlice || d.Partition != nil || d.Admin {
			continue
		}
		sharers := d.Sharers(others.Holders())
		if len(sharers) == 0 || sharers[0].Interval() == d.Interval() {
			continue
		}
		if d.Sharing == nil {
			d.Sharing = &journal.Sharing{UUID: sharers[0].Sharing.UUID}
		}
		d.Sharing.Interval = sharers[0].Interval()
	}
}
