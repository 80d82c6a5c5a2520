// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// reconcileTime bounds what is done for one claim, because calls for the claim
// wait meanwhile.
const reconcileTime = 30 * time.Second

// Reconcile brings the journal, the CDI specs and the API server's claims into
// agreement, at the start, when the driver has appeared, and every now and then:
// preparations and releases that did not end are undone or finished, claims that
// do not exist any more are released, and the MPS sessions and CDI specs of the others
// are made again if they are missing. Claims are independent: one that fails, or that waits
// for its GPU, does not stop the others, and one that a call is at work on is left
// to that call.
//
// An error says what is left, in the same words every time, and that Reconcile
// should be called again.
func (m *Manager) Reconcile(ctx context.Context) error {
	uids, err := m.journal.uids()
	if err != nil {
		return err
	}
	boot, err := m.roots.BootID()
	if err != nil {
		return err
	}
	seen, err := m.observeSessions(ctx)
	if err != nil {
		return err
	}
	errs, unknown := make([]error, len(uids)), make([]error, len(uids))
	var wg sync.WaitGroup
	for i, uid := range uids {
		wg.Go(func() {
			ctx := klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "claimUID", uid))
			var is fate
			is, unknown[i] = m.ask(ctx, uid, boot)
			if err := m.reconcile(ctx, uid, boot, is, seen); err != nil {
				errs[i] = fmt.Errorf("claim %s: %w", uid, err)
			}
		})
	}
	wg.Wait()
	m.news.keep(uids)
	m.orphans.keep(uids)
	return errors.Join(errors.Join(errs...), firstOf(unknown), seen.unchecked(boot), m.sweepSessions(ctx, boot, seen),
		m.released.sweep(boot, m.clock(), m.locks.tryClaim), m.locks.sweep())
}

// firstOf stands for all claims: when the API server does not answer, it has the
// same reason for all of them.
func firstOf(unknown []error) error {
	for _, err := range unknown {
		if err != nil {
			return fmt.Errorf("it is not known which claims still exist: %w", err)
		}
	}
	return nil
}

func (m *Manager) reconcile(ctx context.Context, uid types.UID, boot string, is fate, seen observed) error {
	release, err := m.locks.tryClaim(uid)
	if err != nil || release == nil {
		return err
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, reconcileTime)
	defer cancel()
	// A call, or another instance of the plugin, may have finished it by now.
	r, err := m.load(ctx, uid, boot)
	switch {
	case err != nil:
		return err
	case r == nil:
		return m.journal.delete(uid)
	case r.State != Prepared:
		klog.FromContext(ctx).Info("Cleaning up what an earlier call left", "claim", r.Claim, "state", r.State)
		return m.unprepare(ctx, r, boot)
	case is == orphaned:
		return m.releaseOrphan(ctx, r, boot)
	case r.BootID != boot:
		// The kubelet prepares it again before it starts a container, or releases
		// it. Device numbers have moved meanwhile.
		return m.cdi.Remove(uid)
	}
	return m.lookAfter(ctx, r, seen)
}

// lookAfter makes sure that a prepared claim has its MPS sessions and its CDI spec,
// and that one whose partition was found to be missing has none: the device numbers
// may be those of another claim's by now. It looks nothing up on the GPUs.
func (m *Manager) lookAfter(ctx context.Context, r *Record, seen observed) error {
	for i := range r.Devices {
		if d := &r.Devices[i]; d.Partition.uuid() != "" && m.surveys.isGone(d) {
			err := fmt.Errorf("device %s: partition %s was removed by somebody else, or by a reset of the GPU", d.Device, d.Partition.uuid())
			m.news.tell(ctx, r.Claim, ReasonPartitionGone, "The claim "+r.Claim.String()+": "+err.Error()+
				". Its containers cannot use it any more; delete the pods.")
			return errors.Join(err, m.cdi.Remove(r.Claim.UID))
		}
	}
	if m.inventory.Load() == nil {
		return fmt.Errorf("its CDI spec is not checked: %w", errNoInventory)
	}
	err := m.tend(ctx, r, seen)
	if slices.ContainsFunc(r.Sessions, func(s SessionRecord) bool { return !s.live() }) {
		// The spec that is there names a daemon that is gone, so no container starts.
		return err
	}
	return errors.Join(err, m.rewrite(ctx, r))
}

func (m *Manager) rewrite(ctx context.Context, r *Record) error {
	devices, err := m.cdiDevices(r)
	if err != nil {
		return err
	}
	_, err = m.cdi.Write(ctx, r.Claim.UID, devices)
	return err
}
