// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/util/steptime"
)

// releaseTime bounds a release. The kubelet waits 45 seconds for an answer, and no pod ends before.
const releaseTime = 18 * time.Second

// release releases what a claim has that was prepared by a call that arrived before this time.
//
// Once it is written down that the claim is released that is a success: the CDI spec is gone, pods can end, and what cannot
// be released yet (a GPU that does not answer or is in use, no MPS supervisor) is what Reconcile or the next claim for the
// place does. Where the disk takes nothing, everything is released all the same. Only if something is left then, or may be, the
// error lets the kubelet come again: another process would not know of the release.
func release(ctx context.Context, e *converge.Engine, uid types.UID, arrived time.Duration) error {
	if err := record.CheckUID(uid); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, releaseTime)
	defer cancel()
	logger := klog.FromContext(ctx)
	end := steptime.Of(ctx).Begin(steptime.Journal)
	snapshot, writeErr := e.Store.Release(uid, arrived)
	if end(); writeErr != nil {
		logger.Error(writeErr, "Releasing a claim without writing it down")
		snapshot = e.Store.Snapshot()
	}
	r := cmp.Or(snapshot.Of(uid), &record.Record{Claim: record.Ref{UID: uid}})
	if r.BootID == e.Store.Boot() && r.State != record.Releasing {
		return nil // a younger call has prepared it, or is about to: this one is of an earlier pod
	}
	// Containers have ended. From now on none can be started with what is going.
	if err := e.Specs.Remove(ctx, uid); err != nil {
		logger.Error(err, "What containers get of a claim that is released stays")
	}
	err := errors.Join(e.Finish(ctx, r, r.GPUs()), snapshot.Err)
	if snapshot.IsGuarded(uid) {
		// The record goes when nothing is there that it could be about.
		err = errors.Join(err, errors.New("what its record is about, which cannot be read, may be left"))
	}
	switch {
	case err != nil && writeErr != nil:
		return errors.Join(err, fmt.Errorf("it cannot be written down that the claim is released: %w", writeErr))
	case err != nil:
		logger.Info("The rest of the claim is released later", "reason", err)
	}
	return nil
}
