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

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/steptime"
)

// releaseTime bounds a release. The kubelet waits 45 seconds for an answer, and no pod ends before.
const releaseTime = 18 * time.Second

// Unprepare releases everything that a claim has, and answers within 20 seconds. It needs the records only: no inventory, no allocation.
// A claim without a record is a success.
//
// Once it is written down that the claim is released the call succeeds: the CDI spec is gone, pods can end, and what cannot
// be released yet (a GPU that does not answer or is in use, no MPS supervisor) is what Reconcile or the next claim for the
// place does. Where the disk takes nothing, everything is released all the same. Only if something is left then the error
// lets the kubelet come again: another process would not know of the release.
//
// From then on a Prepare that arrived before this call is refused, see [Arrived].
func (m *Manager) Unprepare(ctx context.Context, uid types.UID) error {
	arrived := m.arrival(ctx)
	if err := record.CheckUID(uid); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, releaseTime)
	defer cancel()
	written, writeErr := m.release(ctx, uid, arrived)
	if m.isPreparedSince(uid) {
		return nil // the call is of an earlier pod
	}
	// Containers have ended. From now on none can be started with what is going.
	if err := m.specs.Remove(ctx, uid); err != nil {
		klog.FromContext(ctx).Error(err, "The CDI spec of a claim that is released stays")
	}
	err := m.finish(ctx, uid)
	switch {
	case err != nil && !written:
		return errors.Join(err, writeErr)
	case err != nil:
		klog.FromContext(ctx).Info("The rest of the claim is released later", "reason", err)
	}
	return nil
}

// isPreparedSince reports whether the claim has been prepared, or is about to be, by a call that is younger than its release.
func (m *Manager) isPreparedSince(uid types.UID) bool {
	r, err := m.store.Read(uid)
	return err == nil && r != nil && r.BootID == m.store.Boot() && r.State != record.Releasing
}

// release notes that a claim is released.
func (m *Manager) release(ctx context.Context, uid types.UID, arrived time.Duration) (written bool, err error) {
	defer steptime.Of(ctx).Begin(steptime.Journal)()
	written, err = m.store.Release(uid, arrived)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Releasing a claim without writing it down")
		err = fmt.Errorf("it cannot be written down that the claim is released: %w", err)
	}
	return written, err
}

// finish releases what a claim has, and returns what is left.
func (m *Manager) finish(ctx context.Context, uid types.UID) error {
	snapshot := m.store.Snapshot()
	var gpus, guarded []string
	for _, r := range slices.Concat(snapshot.Records, snapshot.Earlier) {
		if r.Claim.UID == uid {
			gpus = append(gpus, r.GPUs()...)
		}
	}
	for i := range snapshot.Guards {
		if g := &snapshot.Guards[i]; g.Claim == uid {
			guarded = append(guarded, m.orAll(g.GPUs)...)
		}
	}
	err := m.engine.Finish(ctx, uid, gpus)
	for _, address := range guarded {
		// Nothing may be left of what the claim's unreadable record is about.
		if _, guardErr := m.engine.Converge(ctx, address); guardErr != nil {
			klog.FromContext(ctx).Error(guardErr, "What a record that cannot be read is about is not known to be released")
		}
	}
	if len(gpus) == 0 {
		// Also what a process left that was killed before its first record.
		if err := m.specs.Limits.Drop(uid); err != nil {
			klog.FromContext(ctx).Error(err, "The folder for software limits stays until it can be removed")
		}
	}
	return err
}

// orAll are the GPUs that a record which cannot be read may be about: nil stands for all.
func (m *Manager) orAll(gpus []string) []string {
	if gpus == nil {
		return m.GPUs()
	}
	return gpus
}
