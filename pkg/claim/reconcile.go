// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/survey"
	"github.com/partage-dev/partage/pkg/logchange"
)

// reconcileTime bounds what is done for one claim, because calls for the claim
// wait meanwhile.
const reconcileTime = 30 * time.Second

// Reconcile brings the journal, the CDI specs and the hardware into agreement, at the
// start, when the driver has appeared, and every now and then: preparations and releases
// that did not end are undone or finished, and the MPS sessions and CDI specs of prepared
// claims are made again if they are missing. Claims are independent: one that fails, or
// that waits for its GPU, does not stop the others, and one that a call is at work on is
// left to that call. The API server is not asked, see [Manager.ReleaseOrphans].
//
// An error says what is left, in the same words every time, and that Reconcile
// should be called again.
func (m *Manager) Reconcile(ctx context.Context) error { return m.reconciler.run(ctx) }

// reconciler is what Reconcile and ReleaseOrphans remember.
type reconciler struct {
	*engine
	driver, pool string
	surveyor     *survey.Surveyor
	specs        checkedSpecs

	cluster       Cluster
	orphanGrace   time.Duration
	orphans       orphans
	orphanProblem logchange.Problem
}

func (c *reconciler) run(ctx context.Context) error {
	uids, err := c.store.UIDs()
	if err != nil {
		return err
	}
	seen, err := c.viewSessions(ctx)
	if err != nil {
		return err
	}
	errs := concurrently(ctx, len(uids), func(i int) error {
		ctx := klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "claimUID", uids[i]))
		if err := c.reconcile(ctx, uids[i], seen); err != nil {
			return fmt.Errorf("claim %s: %w", uids[i], err)
		}
		return nil
	})
	c.events.retain(uids)
	c.failing.retain(uids)
	c.specs.retain(uids)
	return errors.Join(errors.Join(errs...), seen.unchecked(), c.reconcileSessions(ctx, seen),
		c.store.SweepTombstones(c.clock(), c.locks.TryClaim), c.sweepLimits(ctx))
}

// sweepLimits removes what the release of claims had no time for.
func (c *reconciler) sweepLimits(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reconcileTime)
	defer cancel()
	return c.kit.Limits.Sweep(ctx)
}

func (c *reconciler) reconcile(ctx context.Context, uid types.UID, seen sessionView) error {
	unlock, err := c.locks.TryClaim(uid)
	if err != nil || unlock == nil {
		return err
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(ctx, reconcileTime)
	defer cancel()
	// A call, or another instance of the plugin, may have finished it by now.
	r, err := c.load(ctx, uid)
	if err != nil {
		return err
	}
	if r == nil {
		return c.remove(ctx, uid)
	}
	switch {
	case r.State != journal.Prepared:
		klog.FromContext(ctx).Info("Cleaning up what an earlier call left", "claim", r.Claim, "state", r.State)
		return c.release(ctx, r)
	case r.BootID != c.store.Boot():
		// The kubelet prepares it again before it starts a container, or releases
		// it. Device numbers have moved meanwhile.
		return c.kit.CDI.Remove(uid)
	}
	return c.maintain(ctx, r, seen)
}

// maintain makes sure that a prepared claim has its MPS sessions and its CDI spec, and
// that one whose partition is missing has none.
func (c *reconciler) maintain(ctx context.Context, r *journal.Record, seen sessionView) error {
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Partition.Gone() || d.Partition.LiveUUID() != "" && c.surveyor.IsGone(r.Claim.UID, d) {
			return c.partitionGone(ctx, r, d)
		}
	}
	if c.inventory.Load() == nil {
		return fmt.Errorf("its CDI spec is not checked: %w", errNoInventory)
	}
	err := c.repairSessions(ctx, r, seen)
	if slices.ContainsFunc(r.Sessions, func(s journal.Session) bool { return !s.Running() }) {
		// The spec that is there names a daemon that is gone, so no container starts.
		return err
	}
	return errors.Join(err, c.maintainSpec(ctx, r))
}

// partitionGone takes the CDI spec away: the ids in it may be those of another claim's
// partition by now.
func (c *reconciler) partitionGone(ctx context.Context, r *journal.Record, d *journal.Device) error {
	c.specs.forget(r.Claim.UID)
	uuid := d.Partition.LiveUUID()
	if uuid == "" {
		uuid = d.Partition.UUID
	}
	removed := fmt.Sprintf("partition %s was removed by somebody else, or by a reset of the GPU", uuid)
	c.events.once(ctx, r.Claim, ReasonPartitionGone, uuid, fmt.Sprintf(
		"Device %s: its %s. Containers cannot use it any more: delete the pods of the claim.", d.Device, removed))
	err := fmt.Errorf("device %s: %s", d.Device, removed)
	return errors.Join(err, c.kit.CDI.Remove(r.Claim.UID))
}

// keepOnly forgets all other claims.
func keepOnly[V any](known map[types.UID]V, uids []types.UID) {
	maps.DeleteFunc(known, func(uid types.UID, _ V) bool { return !slices.Contains(uids, uid) })
}
