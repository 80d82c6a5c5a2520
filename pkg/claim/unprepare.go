// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// errPending says that the rest has to wait for the driver or the GPU.
var errPending = errors.New("the rest waits until the hardware answers")

// Unprepare releases everything that a claim has. It needs the journal only: no
// inventory, no allocation. A claim without a record is a success.
//
// Without a driver, or with the GPU off the bus, hanging or to be reset, the CDI
// spec goes and the record stays: the call succeeds, so that pods can end, and Reconcile or the
// next claim for the place does the rest.
// A damaged record gives a *CorruptError once; the next call succeeds.
//
// From then on a Prepare that arrived before this call is refused, see [Arrived].
func (m *Manager) Unprepare(ctx context.Context, uid types.UID) error {
	arrived := m.arrival(ctx)
	if err := checkUID(uid); err != nil {
		return err
	}
	boot, err := m.roots.BootID()
	if err != nil {
		return err
	}
	release, err := m.locks.claim(ctx, uid)
	if err != nil {
		return err
	}
	defer release()
	err = m.unprepareUID(ctx, uid, boot)
	if errors.Is(err, errPending) {
		klog.FromContext(ctx).Info("The claim's partitions are destroyed when the hardware answers", "reason", err)
		err = nil
	}
	// Also after a failure: the claim is not wanted any more.
	return errors.Join(err, m.released.put(uid, boot, arrived))
}

func (m *Manager) unprepareUID(ctx context.Context, uid types.UID, boot string) error {
	r, err := m.load(ctx, uid, boot)
	var corrupt *CorruptError
	switch {
	case errors.As(err, &corrupt):
		return errors.Join(err, m.cdi.Remove(uid))
	case err != nil:
		return err
	case r == nil:
		// Also what a process left that was killed before its first record.
		return errors.Join(m.cdi.Remove(uid), m.journal.delete(uid))
	}
	return m.unprepare(ctx, r, boot)
}

// unprepare releases what a record holds. The caller holds the claim's lock. The
// error wraps errPending when all that is left waits for the hardware.
func (m *Manager) unprepare(ctx context.Context, r *Record, boot string) error {
	if r.State != Unpreparing {
		r.State = Unpreparing
		if err := m.journal.save(r); err != nil {
			return err
		}
	}
	if r.BootID != boot {
		// Its instances are gone, and another claim's may be in their place.
		return m.forget(r)
	}
	left := m.release(ctx, r)
	err := left.err()
	if err == nil {
		return m.forget(r)
	}
	failed := m.reduce(r, left)
	if !errors.Is(err, errPending) {
		return errors.Join(err, failed)
	}
	if failed = errors.Join(failed, m.cdi.Remove(r.Claim.UID)); failed != nil {
		return fmt.Errorf("%w (besides: %s)", failed, err.Error())
	}
	return err
}

// reduce leaves in a record what could not be removed: the places of the other
// devices are free for the next claim.
func (m *Manager) reduce(r *Record, left leftovers) error {
	if len(left) == len(r.Devices) {
		return nil
	}
	rest := *r
	rest.Devices = left.devices()
	if err := m.journal.save(&rest); err != nil {
		return err
	}
	r.Devices = rest.Devices
	return nil
}

// forget removes the traces of a claim that has nothing on the hardware.
func (m *Manager) forget(r *Record) error {
	if err := m.cdi.Remove(r.Claim.UID); err != nil {
		return err
	}
	return m.journal.delete(r.Claim.UID)
}

// busyTime bounds the wait for one GPU of a claim that is released. Another process
// may hold it until a call returns that never does, and that cannot be seen from
// here; the claim's other GPUs and the end of its pod must not wait for it.
const busyTime = 10 * time.Second

// leftovers are the partitions that could not be removed, and why.
type leftovers []leftover

type leftover struct {
	device DeviceRecord
	err    error
}

func (l leftovers) devices() []DeviceRecord {
	var devices []DeviceRecord
	for _, one := range l {
		devices = append(devices, one.device)
	}
	return devices
}

// err is nil when nothing is left, and wraps errPending when all of it waits for
// the hardware.
func (l leftovers) err() error {
	if len(l) == 0 {
		return nil
	}
	pending := true
	var errs []error
	for _, one := range l {
		pending = pending && absent(one.err)
		errs = append(errs, fmt.Errorf("device %s: %w", one.device.Device, one.err))
	}
	if pending {
		return fmt.Errorf("%w: %w", errPending, errors.Join(errs...))
	}
	return errors.Join(errs...)
}

// release removes the partitions of a claim, GPU by GPU: one that hangs does not
// keep the others locked.
func (m *Manager) release(ctx context.Context, r *Record) leftovers {
	var left leftovers
	for _, address := range r.gpus() {
		var devices []DeviceRecord
		for _, d := range r.Devices {
			if d.PCIAddress == address && d.made() {
				devices = append(devices, d)
			}
		}
		unlock, err := m.lockFor(ctx, address, busyTime)
		if err != nil {
			for _, d := range devices {
				left = append(left, leftover{d, err})
			}
			continue
		}
		left = append(left, m.destroy(ctx, devices)...)
		unlock()
	}
	return left
}

// lockFor waits no longer than this, nor than ctx.
func (m *Manager) lockFor(ctx context.Context, pciAddress string, limit time.Duration) (func(), error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return m.locks.gpus(ctx, []string{pciAddress})
}

// destroy removes the partitions among devices, last to first. One that cannot be
// removed does not keep the others. The caller holds the locks of the GPUs.
func (m *Manager) destroy(ctx context.Context, devices []DeviceRecord) leftovers {
	var left leftovers
	for _, d := range slices.Backward(devices) {
		if !d.made() {
			continue
		}
		err := m.partitions.Destroy(ctx, d.address(), d.Partition.uuid(), d.DynamicMIG)
		if err != nil {
			left = append(left, leftover{d, err})
		}
	}
	slices.Reverse(left)
	return left
}

// absent tells whether there is nothing to talk to: no driver, no such GPU, or one
// that hangs or does nothing until it is reset, which pods that cannot end would
// prevent. An instance that does not exist is no error of Destroy.
func absent(err error) bool {
	return errors.Is(err, gpu.ErrDriverNotLoaded) || errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrNotFound) ||
		errors.Is(err, gpu.ErrHung) || errors.Is(err, gpu.ErrResetRequired) || errors.Is(err, errBusy)
}
