// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/sharing"
)

// keepIntervals takes over what the first share of a GPU has set, or has left alone,
// whatever the policy says by now: there is one time slice for all of them, and the
// last one resets it.
func (r *Record) keepIntervals(others *neighbours) {
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Type != device.TimeSlice || d.Partition != nil || d.Admin {
			continue
		}
		sharers := d.sharers(others.holders())
		if len(sharers) == 0 {
			continue
		}
		first := sharers[0].DeviceRecord
		if first.interval() == d.interval() {
			continue
		}
		if d.Sharing == nil {
			d.Sharing = &SharingRecord{UUID: first.Sharing.UUID}
		}
		d.Sharing.Interval = first.interval()
	}
}

// interval is empty for a device whose time slice is not touched.
func (d *DeviceRecord) interval() sharing.Interval {
	if d.Sharing == nil {
		return ""
	}
	return d.Sharing.Interval
}

// setIntervals sets the time slices of a claim, unless a share that is prepared has
// done so. It returns for how many devices this was begun.
func (m *Manager) setIntervals(ctx context.Context, r *Record, others *neighbours) (begun int, err error) {
	for i := range r.Devices {
		d := &r.Devices[i]
		isSet := slices.ContainsFunc(d.sharers(others.records), func(o owned) bool {
			return o.record.State == Prepared && o.interval() == d.interval()
		})
		if d.interval() == "" || isSet {
			continue
		}
		if err := m.sharing.SetInterval(ctx, sharing.Device{PCIAddress: d.PCIAddress, UUID: d.Sharing.UUID}, d.interval()); err != nil {
			err = fmt.Errorf("device %s: %w", d.Device, err)
			if refused(err) {
				return i, err
			}
			return i + 1, err
		}
	}
	return len(r.Devices), nil
}

// refused tells from an error that no time slice can be set, so that there is none
// to be reset.
func refused(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, gpu.ErrNoPermission) ||
		errors.Is(err, gpu.ErrNotSupported) || errors.Is(err, gpu.ErrInvalid)
}

// resetInterval gives the GPU back its time slice when nobody needs another one. A
// share that has not asked for one does not mind.
func (m *Manager) resetInterval(ctx context.Context, d *DeviceRecord, others *neighbours) error {
	needed := slices.ContainsFunc(d.sharers(others.holders()), func(o owned) bool { return o.interval() != "" })
	if d.interval() == "" || needed {
		return nil
	}
	err := m.sharing.SetInterval(ctx, sharing.Device{PCIAddress: d.PCIAddress, UUID: d.Sharing.UUID}, policy.IntervalDefault)
	if errors.Is(err, fs.ErrNotExist) {
		// nvidia-smi goes with the driver, and comes back with it.
		return fmt.Errorf("%w: %w", errNoProgram, err)
	}
	return err
}

// errNoProgram: there is nothing to set a time slice with.
var errNoProgram = errors.New("the driver's program is missing")
