// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// errPending says that the rest has to wait for the driver or the GPU.
var errPending = errors.New("the rest waits until the hardware answers")

// Unprepare releases everything that a claim has. It needs the journal only: no
// inventory, no allocation. A claim without a record is a success.
//
// Without a driver, or with the GPU off the bus, the CDI spec goes and the record
// stays: the call succeeds, so that pods can end, and Resume or the next claim for
// the place does the rest.
// A damaged record gives a *CorruptError once; the next call succeeds.
func (m *Manager) Unprepare(ctx context.Context, uid types.UID) error {
	err := m.unprepareUID(ctx, uid)
	if errors.Is(err, errPending) {
		klog.FromContext(ctx).Info("The claim's partitions are destroyed when the hardware answers", "reason", err)
		return nil
	}
	return err
}

func (m *Manager) unprepareUID(ctx context.Context, uid types.UID) error {
	if err := checkUID(uid); err != nil {
		return err
	}
	release, err := m.locks.claim(ctx, uid)
	if err != nil {
		return err
	}
	defer release()
	r, err := m.journal.load(ctx, uid)
	if err != nil {
		var corrupt *CorruptError
		if errors.As(err, &corrupt) {
			return errors.Join(err, m.cdi.Remove(uid))
		}
		return err
	}
	if r == nil {
		// Also what a process left that was killed before its first record.
		return errors.Join(m.cdi.Remove(uid), m.journal.delete(uid))
	}
	boot, err := m.roots.BootID()
	if err != nil {
		return err
	}
	return m.unprepare(ctx, r, boot)
}

// unprepare releases what a record holds. The caller holds the claim's lock. The
// error wraps errPending when the hardware is not there.
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
	release, err := m.locks.gpus(ctx, r.gpus())
	if err != nil {
		return err
	}
	defer release()
	if err := m.destroy(ctx, r, len(r.Devices)); err != nil {
		if errors.Is(err, errPending) {
			return errors.Join(err, m.cdi.Remove(r.Claim.UID))
		}
		return err
	}
	return m.forget(r)
}

// forget removes the traces of a claim that has nothing on the hardware.
func (m *Manager) forget(r *Record) error {
	if err := m.cdi.Remove(r.Claim.UID); err != nil {
		return err
	}
	return m.journal.delete(r.Claim.UID)
}

// destroy removes the partitions among the first devices of a record, last to
// first. One that cannot be removed does not keep the others. The caller holds
// the locks of the GPUs.
func (m *Manager) destroy(ctx context.Context, r *Record, devices int) error {
	var failed, pending []error
	for _, d := range slices.Backward(r.Devices[:devices]) {
		if d.Admin || d.Partition == nil {
			continue
		}
		err := m.partitions.Destroy(ctx, d.address(), d.DynamicMIG)
		switch {
		case err == nil:
		case absent(err):
			pending = append(pending, fmt.Errorf("device %s: %w", d.Device, err))
		default:
			failed = append(failed, fmt.Errorf("device %s: %w", d.Device, err))
		}
	}
	switch {
	case len(failed) > 0:
		return errors.Join(append(failed, pending...)...)
	case len(pending) > 0:
		return fmt.Errorf("%w: %w", errPending, errors.Join(pending...))
	}
	return nil
}

// absent tells whether there is nothing to talk to: no driver, or no such GPU. An
// instance that does not exist is no error of Destroy.
func absent(err error) bool {
	return errors.Is(err, gpu.ErrDriverNotLoaded) || errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrNotFound)
}

// undo takes back the first begun steps of a preparation that failed. What it
// cannot take back stays written down as Unpreparing. The caller holds the locks
// of the claim and of its GPUs.
func (m *Manager) undo(ctx context.Context, r *Record, begun int) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	err := m.destroy(ctx, r, begun)
	if err == nil {
		err = m.forget(r)
	}
	if err == nil {
		return nil
	}
	r.State = Unpreparing
	return fmt.Errorf("undo: %w", errors.Join(err, m.cdi.Remove(r.Claim.UID), m.journal.save(r)))
}
