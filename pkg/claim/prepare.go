// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/partition"
)

// Prepare makes all devices of a claim ready for containers, or none: when a
// step fails, what was done is undone before the call returns, and what cannot
// be undone is written down for Resume. Repeating the call gives the same answer.
//
// Errors name the device. They wrap *api.InvalidError or *api.UnsupportedError
// for a bad configuration, *OverlapError when another claim holds the place, and
// the reasons of package gpu when the hardware refuses.
func (m *Manager) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]PreparedDevice, error) {
	plan, err := m.plan(claim)
	if err != nil {
		return nil, err
	}
	if len(plan.Steps) == 0 {
		return nil, nil
	}
	boot, err := m.roots.BootID()
	if err != nil {
		return nil, err
	}
	release, err := m.locks.claim(ctx, claim.UID)
	if err != nil {
		return nil, err
	}
	defer release()

	earlier, err := m.earlier(ctx, plan, boot)
	if err != nil {
		return nil, err
	}
	record, err := m.prepare(ctx, plan, earlier, boot)
	var overlap *OverlapError
	if errors.As(err, &overlap) && overlap.abandoned() {
		if err := m.clear(ctx, overlap); err != nil {
			return nil, err
		}
		record, err = m.prepare(ctx, plan, earlier, boot)
	}
	if err != nil {
		return nil, err
	}
	return record.prepared(), nil
}

// earlier returns the record of an earlier preparation of the same devices, of
// this boot, or nil. A preparation of other devices is undone. The caller holds
// the claim's lock.
func (m *Manager) earlier(ctx context.Context, plan *Plan, boot string) (*Record, error) {
	r, err := m.journal.load(ctx, plan.Claim.UID)
	var corrupt *CorruptError
	if errors.As(err, &corrupt) {
		// It is reported. What it said follows from the allocation as well.
		return nil, nil
	}
	if err != nil || r == nil {
		return nil, err
	}
	switch {
	case r.BootID != boot:
		return nil, nil
	case r.State != Unpreparing && r.sameDevices(plan.record(boot)):
		return r, nil
	}
	if r.State != Unpreparing {
		klog.FromContext(ctx).Info("The claim was prepared for other devices, they are released first")
	}
	if err := m.unprepare(ctx, r, boot); err != nil {
		return nil, fmt.Errorf("release what the claim had before: %w", err)
	}
	return nil, nil
}

// clear finishes what an abandoned claim left, or waits until the call that is
// just releasing it has done so. The caller holds its own claim's lock and no
// GPU's. Two claims that clear each other would wait for ever, so the time is
// limited.
func (m *Manager) clear(ctx context.Context, overlap *OverlapError) error {
	ctx, cancel := context.WithTimeout(ctx, clearTime)
	defer cancel()
	uid := overlap.Other.UID
	release, err := m.locks.claim(ctx, uid)
	if err != nil {
		return errors.Join(overlap, err)
	}
	defer release()
	r, err := m.journal.load(ctx, uid)
	if err != nil {
		return errors.Join(overlap, err)
	}
	if r == nil {
		return nil
	}
	if r.State == Prepared {
		return overlap
	}
	boot, err := m.roots.BootID()
	if err != nil {
		return errors.Join(overlap, err)
	}
	klog.FromContext(ctx).Info("Cleaning up what another claim left", "other", r.Claim, "state", r.State)
	if err := m.unprepare(ctx, r, boot); err != nil {
		return errors.Join(overlap, err)
	}
	return nil
}

// prepare takes all steps. The caller holds the claim's lock.
func (m *Manager) prepare(ctx context.Context, plan *Plan, earlier *Record, boot string) (*Record, error) {
	release, err := m.locks.gpus(ctx, plan.gpus())
	if err != nil {
		return nil, err
	}
	defer release()
	if earlier != nil && earlier.State == Prepared {
		return m.verify(ctx, plan, earlier)
	}
	r := plan.record(boot)
	if err := m.checkOverlap(ctx, r); err != nil {
		return nil, err
	}
	// An earlier attempt may have made any of the partitions.
	fresh := earlier == nil && !m.journal.wasCorrupt(plan.Claim.UID)
	if fresh {
		if err := m.checkForeign(ctx, plan); err != nil {
			return nil, err
		}
	}
	if err := m.journal.save(r); err != nil {
		if fresh {
			err = errors.Join(err, m.forget(r))
		}
		return nil, err
	}
	if begun, err := m.apply(ctx, plan, r); err != nil {
		if !fresh {
			begun = len(r.Devices)
		}
		return nil, errors.Join(err, m.undo(ctx, r, begun))
	}
	r.State = Prepared
	if err := m.journal.save(r); err != nil {
		return nil, errors.Join(err, m.undo(ctx, r, len(r.Devices)))
	}
	return r, nil
}

// verify is the cheap way for a claim that is prepared: everything is looked up
// and the spec is written if it is missing. A failure undoes nothing, because
// containers may be running.
func (m *Manager) verify(ctx context.Context, plan *Plan, earlier *Record) (*Record, error) {
	r := earlier.clone()
	if _, err := m.apply(ctx, plan, r); err != nil {
		return nil, fmt.Errorf("the claim was prepared before: %w", err)
	}
	if r.sameResult(earlier) {
		return r, nil
	}
	klog.FromContext(ctx).Info("The claim was prepared before and is not what its record said, the record is brought up to date")
	return r, m.journal.save(r)
}

// checkForeign refuses a partition that exists without any record: somebody
// else made it, and it must not be destroyed when the claim ends.
func (m *Manager) checkForeign(ctx context.Context, plan *Plan) error {
	for _, step := range plan.Steps {
		if step.Admin || step.Device.Kind != device.Partition {
			continue
		}
		live, found, err := m.partitions.Find(ctx, step.address())
		if err != nil {
			return fmt.Errorf("device %s: %w", step.Device.Name, err)
		}
		if found {
			return fmt.Errorf("device %s: GPU instance %d (%s) is there already and was not made by this driver; it is left alone",
				step.Device.Name, live.InstanceID, live.UUID)
		}
	}
	return nil
}

// apply takes the steps, finds the device nodes and writes the CDI spec. It
// fills in the record and returns the number of steps that were begun.
func (m *Manager) apply(ctx context.Context, plan *Plan, r *Record) (begun int, err error) {
	for i, step := range plan.Steps {
		live, err := m.take(ctx, step)
		if err != nil {
			return i + 1, fmt.Errorf("device %s: %w", step.Device.Name, err)
		}
		if p := r.Devices[i].Partition; p != nil {
			p.Live = live
		}
	}
	begun = len(plan.Steps)
	devices, err := m.cdiDevices(r)
	if err != nil {
		return begun, err
	}
	ids, err := m.cdi.Write(ctx, r.Claim.UID, devices)
	if err != nil {
		return begun, err
	}
	for i := range r.Devices {
		id, found := ids[r.Devices[i].name()]
		if !found {
			return begun, fmt.Errorf("device %s: its CDI spec does not name it", r.Devices[i].Device)
		}
		r.Devices[i].CDIDevice = id
	}
	return begun, nil
}

// take makes one device exist. It returns what is live of a partition.
func (m *Manager) take(ctx context.Context, step Step) (*partition.Live, error) {
	switch {
	case step.Device.Kind == device.Partition && step.Admin:
		live, found, err := m.partitions.Find(ctx, step.address())
		if err != nil {
			return nil, err
		}
		if !found {
			return nil, fmt.Errorf("there is no partition with %s now, and admin access does not make one", step.address())
		}
		return &live, nil
	case step.Device.Kind == device.Partition:
		live, err := m.partitions.Create(ctx, step.address(), step.dynamic())
		if err != nil {
			return nil, err
		}
		return &live, nil
	case step.Admin || step.Device.GPU.MIG == nil:
		return nil, nil
	}
	return nil, m.partitions.EnsureWhole(ctx, step.Device.GPU.PCIAddress, step.dynamic())
}

// prepared is what the kubelet is told.
func (r *Record) prepared() []PreparedDevice {
	var devices []PreparedDevice
	for i := range r.Devices {
		d := &r.Devices[i]
		devices = append(devices, PreparedDevice{
			Requests: d.Requests, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID, Admin: d.Admin,
			CDIDeviceIDs: []string{d.CDIDevice},
		})
	}
	return devices
}

// sameResult tells whether two records of the same devices say the same about
// what became of them.
func (r *Record) sameResult(other *Record) bool {
	for i := range r.Devices {
		a, b := &r.Devices[i], &other.Devices[i]
		if a.CDIDevice != b.CDIDevice {
			return false
		}
		if a.Partition != nil && (b.Partition.Live == nil || *a.Partition.Live != *b.Partition.Live) {
			return false
		}
	}
	return true
}
