// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
)

// retryPauses are the waits between attempts that fail for a reason that may
// pass. The kubelet gives a call 45 seconds and comes back only after a minute.
var retryPauses = []time.Duration{
	200 * time.Millisecond,
	500 * time.Millisecond,
	time.Second,
	2 * time.Second,
	4 * time.Second,
}

// retryTime bounds all attempts together: a new one does not begin later.
const retryTime = 20 * time.Second

// Prepare makes all devices of a claim ready for containers, or none: when a
// step fails, what was done is undone before the call returns, and what cannot
// be undone is written down for Reconcile. Repeating the call gives the same
// answer.
//
// It waits for up to 15 seconds for a place that another claim still holds, and
// tries again for up to 20 seconds what fails for a reason that may pass, both
// within ctx. A call that is older than the claim's release is refused, see
// [Arrived].
//
// Errors name the device. They wrap *api.InvalidError for a bad configuration,
// *OverlapError when another claim holds the place, sharing.ErrNoSupervisor when
// nothing starts MPS, and the reasons of package gpu when the hardware refuses.
func (m *Manager) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]PreparedDevice, error) {
	arrived := m.arrival(ctx)
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

	if err := m.released.pass(claim.UID, boot, arrived); err != nil {
		return nil, err
	}
	record, err := m.insist(ctx, plan, boot)
	if err != nil {
		return nil, err
	}
	if err := m.journal.quarantine.drop(claim.UID, boot); err != nil {
		return nil, err
	}
	return record.prepared(), nil
}

// insist tries again while that may help. The caller holds the claim's lock, and
// between two attempts nobody holds a GPU's.
func (m *Manager) insist(ctx context.Context, plan *Plan, boot string) (*Record, error) {
	limited, cancel := context.WithTimeout(ctx, retryTime)
	defer cancel()
	for tried := 1; ; tried++ {
		record, err := m.makeRoom(ctx, plan, boot)
		if err == nil {
			return record, nil
		}
		if !passing(err) || tried > len(retryPauses) || pause(limited, retryPauses[tried-1]) != nil {
			if tried > 1 {
				err = fmt.Errorf("tried %d times: %w", tried, err)
			}
			return nil, err
		}
		klog.FromContext(ctx).Info("Trying again", "tried", tried, "reason", err)
	}
}

// passing tells whether another attempt may succeed. A GPU that somebody else has
// divided stays so. A supervisor that does not answer may be starting.
func passing(err error) bool {
	var traceless *tracelessError
	if !errors.As(err, &traceless) || errors.Is(err, gpu.ErrHung) || errors.Is(err, partition.ErrDivided) {
		return false
	}
	return gpu.Transient(err) || errors.Is(err, sharing.ErrNoSupervisor)
}

// tracelessError is a failure of an attempt that has left nothing, or that has
// found the claim prepared before.
type tracelessError struct{ error }

func (e *tracelessError) Unwrap() error { return e.error }

// makeRoom makes an attempt, and others as long as claims are in the way that may
// be about to go.
func (m *Manager) makeRoom(ctx context.Context, plan *Plan, boot string) (*Record, error) {
	record, err := m.attempt(ctx, plan, boot)
	var overlap *OverlapError
	if !errors.As(err, &overlap) {
		return record, err
	}
	limited, cancel := context.WithTimeout(ctx, roomTime)
	defer cancel()
	for errors.As(err, &overlap) {
		if err := m.await(limited, overlap, boot); err != nil {
			return nil, err
		}
		record, err = m.attempt(ctx, plan, boot)
	}
	return record, err
}

func (m *Manager) attempt(ctx context.Context, plan *Plan, boot string) (*Record, error) {
	earlier, err := m.earlier(ctx, plan, boot)
	if err != nil {
		return nil, err
	}
	return m.prepare(ctx, plan, earlier, boot)
}

// earlier returns the record of an earlier preparation of the same devices, of
// this boot, or nil. One of the boot before only makes the plan one to have these
// devices again. A preparation of other devices is undone. The caller holds the
// claim's lock.
func (m *Manager) earlier(ctx context.Context, plan *Plan, boot string) (*Record, error) {
	r, err := m.load(ctx, plan.Claim.UID, boot)
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
		plan.again = r.State == Prepared && r.arrange(plan.record(boot))
		return nil, nil
	case r.State != Unpreparing && r.arrange(plan.record(boot)):
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
