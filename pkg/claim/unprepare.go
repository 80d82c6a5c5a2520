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

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/lock"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/steptime"
)

// Unprepare releases everything that a claim has. It needs the journal only: no
// inventory, no allocation. A claim without a record is a success.
//
// What cannot be released for a reason that may last (no driver, a GPU off the bus,
// hanging or in use, no permission, a lock that another process does not give back; any
// reason after a minute) stays in the record: the CDI spec goes, the call succeeds, so
// that pods can end, and Reconcile or the next claim for the place does the rest. A full
// disk does not keep anything from being released, but what is left is then an error: nobody
// would know of it.
//
// A damaged record gives a *CorruptError once; the next call succeeds.
//
// From then on a Prepare that arrived before this call is refused, see [Arrived].
func (m *Manager) Unprepare(ctx context.Context, uid types.UID) error {
	arrived := m.arrival(ctx)
	if err := journal.CheckUID(uid); err != nil {
		return err
	}
	unlock, err := m.lockClaim(ctx, uid)
	if errors.Is(err, lock.ErrElsewhere) {
		// Reconcile releases a claim that is prepared and has a younger tombstone.
		klog.FromContext(ctx).Info("The claim is released when another process gives it back", "reason", err)
		written, buryErr := m.bury(ctx, uid, arrived)
		if !written && buryErr == nil {
			buryErr = fmt.Errorf("it cannot be written down that the claim is to be released: %w", err)
		}
		return errors.Join(m.kit.CDI.Remove(uid), buryErr)
	}
	if err != nil {
		return err
	}
	defer unlock()
	// First: whoever is killed after that, the claim is one that is being released.
	written, buryErr := m.bury(ctx, uid, arrived)
	err = m.releaseUID(ctx, uid)
	if errors.Is(err, errPending) && (written || m.isReleasing(uid)) {
		klog.FromContext(ctx).Info("The rest of the claim is released later", "reason", err)
		err = nil
	}
	return errors.Join(err, buryErr)
}

// isReleasing reports whether the next process will know that the claim is to be released.
func (m *Manager) isReleasing(uid types.UID) bool {
	r, err := m.store.Read(uid)
	return err == nil && r != nil && r.State == journal.Unpreparing
}

// lockClaim waits for calls of this process, and for another process not as long.
func (m *Manager) lockClaim(ctx context.Context, uid types.UID) (func(), error) {
	soon, cancel := context.WithTimeout(ctx, lockTime)
	defer cancel()
	unlock, err := m.locks.Claim(soon, uid)
	if err == nil || ctx.Err() != nil || errors.Is(err, lock.ErrElsewhere) {
		return unlock, err
	}
	return m.locks.Claim(ctx, uid)
}

func (m *Manager) releaseUID(ctx context.Context, uid types.UID) error {
	r, err := m.load(ctx, uid)
	var corrupt *CorruptError
	switch {
	case errors.As(err, &corrupt):
		return errors.Join(err, m.releaseFiles(ctx, uid))
	case err != nil:
		return err
	case r == nil:
		// Also what a process left that was killed before its first record.
		return errors.Join(m.releaseFiles(ctx, uid), m.remove(ctx, uid), m.dropQuarantined(ctx, uid, nil))
	}
	if err := m.release(ctx, r); err != nil {
		return err
	}
	return m.dropQuarantined(ctx, uid, nil)
}

// releaseFiles undoes the steps that belong to a claim and to no GPU.
func (e *engine) releaseFiles(ctx context.Context, uid types.UID) error {
	defer steptime.Of(ctx).Begin(steptime.CDI)()
	return errors.Join(e.kit.CDI.Remove(uid), e.kit.Limits.Drop(uid))
}

// release undoes the steps of a record, group by group, and removes the record with the
// last one. The caller holds the claim's lock. The error wraps errPending when all that
// is left has to wait.
func (e *engine) release(ctx context.Context, r *journal.Record) error {
	if r.State != journal.Unpreparing {
		r.State = journal.Unpreparing
		err := e.save(ctx, r)
		if journal.NoSpace(err) {
			klog.FromContext(ctx).Error(err, "Releasing a claim without writing it down")
		} else if err != nil {
			return err
		}
	}
	// Containers have ended. From now on none can be started with what is going.
	filesErr := e.releaseFiles(ctx, r.Claim.UID)
	if r.BootID != e.store.Boot() {
		// Its instances are gone, and another claim's may be in their place.
		if filesErr != nil {
			return filesErr
		}
		return e.remove(ctx, r.Claim.UID)
	}
	record, errs := e.releaseGroups(ctx, r)
	if len(errs) > 0 {
		// The call may succeed now, and the tombstone does not outlive the boot.
		if err := record.write(); err != nil && !journal.NoSpace(err) {
			errs = append(errs, err)
		}
	}
	switch {
	case len(errs) > 0 && filesErr == nil:
		return e.pendingOr(r.Claim, errs)
	case len(errs) > 0 || filesErr != nil:
		return errors.Join(append(errs, filesErr)...)
	}
	e.failing.forget(r.Claim.UID)
	if record.unwritten.Load() {
		return e.releaseAtOnce(ctx, r)
	}
	return record.finish()
}

// releaseAtOnce undoes everything once more and removes the record under the locks of all
// GPUs. On a full disk the journal could not say which groups were released, so that others
// may have left to this claim what they share with it.
func (e *engine) releaseAtOnce(ctx context.Context, r *journal.Record) error {
	var gpus []string
	groups := step.Groups(r)
	for _, g := range groups {
		gpus = append(gpus, g.GPUs...)
	}
	unlock, err := e.lockSoon(ctx, gpu.SortPCIAddresses(gpus))
	if err != nil {
		return fmt.Errorf("%w: %w", errPending, err)
	}
	defer unlock()
	snapshot, err := e.store.Snapshot()
	if err != nil {
		return err
	}
	var errs []error
	for _, g := range groups {
		s := &step.Scene{Record: g.Part, Others: snapshot.Others(r.Claim.UID), Attempt: step.Resumed}
		steps := e.kit.Steps(g.Part)
		errs = append(errs, step.Undo(ctx, steps, len(steps), s)...)
	}
	if len(errs) > 0 {
		return e.pendingOr(r.Claim, errs)
	}
	return e.remove(ctx, r.Claim.UID)
}

// releaseGroups releases all groups at the same time: a GPU that hangs does not keep the
// others. It returns what went wrong, for each step.
func (e *engine) releaseGroups(ctx context.Context, r *journal.Record) (*recorder, []error) {
	groups := step.Groups(r)
	record := newRecorder(ctx, e.store, r, len(groups))
	for i, g := range groups {
		if slices.ContainsFunc(g.Part.Devices, func(d journal.Device) bool { return step.Releasable(&d) }) {
			record.set(i, g.Part)
		}
	}
	failed := make([][]error, len(groups))
	panicked := concurrently(ctx, len(groups), func(i int) error {
		if part := record.part(i); part != nil {
			failed[i] = e.releaseGroup(ctx, record, i, groups[i].GPUs, part)
		}
		return nil
	})
	errs := slices.Concat(failed...)
	if err := errors.Join(panicked...); err != nil {
		errs = append(errs, err)
	}
	return record, errs
}

// releaseGroup undoes the steps of one group and notes what is left, under its locks.
func (e *engine) releaseGroup(ctx context.Context, record *recorder, i int, gpus []string, part *journal.Record) []error {
	unlock, err := e.lockSoon(ctx, gpus)
	if err != nil {
		return []error{fmt.Errorf("device %s: %w", part.Devices[0].Device, err)}
	}
	defer unlock()
	snapshot, err := e.store.Snapshot()
	if err != nil {
		return []error{err}
	}
	s := &step.Scene{Record: part, Others: snapshot.Others(part.Claim.UID), Attempt: step.Resumed}
	steps := e.kit.Steps(part)
	errs := step.Undo(ctx, steps, len(steps), s)
	part.Devices = slices.DeleteFunc(part.Devices, func(d journal.Device) bool { return !step.Releasable(&d) })
	if len(part.Devices) == 0 {
		err = record.drop(i)
	} else {
		err = record.save(i, part)
	}
	if journal.NoSpace(err) {
		klog.FromContext(ctx).Error(err, "What is released is not written down")
		record.unwritten.Store(true)
		err = nil
	}
	if err != nil {
		errs = append(errs, err)
	}
	return errs
}

// dropQuarantined removes the damaged files of a claim that is prepared again, with the
// same devices, or that is released, if there is nothing that they could be about.
func (m *Manager) dropQuarantined(ctx context.Context, uid types.UID, now *journal.Record) error {
	files, err := m.store.Quarantined(uid)
	if err != nil || len(files) == 0 {
		return err
	}
	if now != nil && m.store.QuarantinedNames(uid, now) {
		return m.store.DropQuarantined(uid)
	}
	if now == nil {
		// Whose a compute mode is that a session has left cannot be seen.
		snapshot, err := m.store.Snapshot()
		if err != nil || snapshot.OfClaimMayHaveSessions(uid) {
			return err
		}
	}
	inventory := m.inventory.Load()
	if inventory == nil {
		return nil
	}
	unexplained, err := m.surveyor.Unexplained(ctx, inventory, uid)
	if err != nil || unexplained {
		klog.FromContext(ctx).Info("The damaged journal file of a released claim stays: something on the GPUs may be the claim's", "path", files[0], "reason", err)
		return nil
	}
	klog.FromContext(ctx).Info("Nothing is left of a released claim, its damaged journal file is removed", "path", files[0])
	return m.store.DropQuarantined(uid)
}
