// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// Resume finishes what an earlier process left half done, at the start and when
// the driver has appeared: preparations and releases that did not end are undone
// or finished, and the CDI specs of prepared claims are made again if they are
// missing. Claims are independent: one that fails, or that waits for its GPU,
// does not stop the others.
//
// An error means that something is left and that Resume should be called again.
func (m *Manager) Resume(ctx context.Context) error {
	uids, err := m.journal.uids()
	if err != nil {
		return err
	}
	boot, err := m.roots.BootID()
	if err != nil {
		return err
	}
	errs := make([]error, len(uids), len(uids)+1)
	var wg sync.WaitGroup
	for i, uid := range uids {
		wg.Go(func() {
			if err := m.resume(ctx, uid, boot); err != nil {
				errs[i] = fmt.Errorf("claim %s: %w", uid, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(append(errs, m.locks.sweep())...)
}

func (m *Manager) resume(ctx context.Context, uid types.UID, boot string) error {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claimUID", uid)
	ctx = klog.NewContext(ctx, logger)
	release, err := m.locks.claim(ctx, uid)
	if err != nil {
		return err
	}
	defer release()
	// Another instance of the plugin may have finished it by now.
	r, err := m.journal.load(ctx, uid)
	switch {
	case err != nil:
		return err
	case r == nil:
		return m.journal.delete(uid)
	case r.State != Prepared:
		logger.Info("Cleaning up what an earlier process left", "claim", r.Claim, "state", r.State)
		return m.unprepare(ctx, r, boot)
	case r.BootID != boot:
		// The kubelet prepares it again before it starts a container, or releases it.
		return nil
	}
	return m.rewrite(ctx, r)
}

// rewrite makes sure that a prepared claim has its CDI spec. It looks nothing up
// on the hardware.
func (m *Manager) rewrite(ctx context.Context, r *Record) error {
	if m.inventory.Load() == nil {
		return fmt.Errorf("its CDI spec is not checked: %w", errNoInventory)
	}
	devices, err := m.cdiDevices(r)
	if err != nil {
		return err
	}
	_, err = m.cdi.Write(ctx, r.Claim.UID, devices)
	return err
}
