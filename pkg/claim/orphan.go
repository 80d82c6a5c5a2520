// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim/converge"
	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/panics"
)

// orphans are prepared claims that do not exist any more, or that are not allocated here. A pod that is deleted by force
// takes its claim with it before the kubelet has stopped its containers, so the kubelet gets time to release the claim
// itself.
type orphans struct {
	driver, pool string
	store        *record.Store
	engine       *converge.Engine
	events       *eventLog
	cluster      Cluster
	grace        time.Duration
	clock        func() time.Duration
	inquiries    *inquiries
	problem      logchange.Problem

	mu sync.Mutex
	// seen are the claims that did not have their devices when the API server was asked last.
	seen map[types.UID]orphan
}

// orphan is a claim as it was prepared at one time: it may be prepared anew.
type orphan struct {
	prepared, since time.Duration
	// confirmed means that it has been one for long enough.
	confirmed bool
}

func newOrphans(m *Manager, o Options) *orphans {
	return &orphans{
		driver: o.DriverName, pool: o.PoolName, store: m.store, engine: m.engine, events: m.events, cluster: o.Cluster,
		grace: cmp.Or(o.OrphanGrace, DefaultOrphanGrace), clock: o.clock,
		inquiries: newInquiries(cmp.Or(o.CheckInterval, DefaultCheckInterval)), seen: map[types.UID]orphan{},
	}
}

// ReleaseOrphans releases prepared claims that do not have their devices any more, until ctx ends: they were deleted, or
// deallocated, and the kubelet has not released them itself, because it has lost its state or was not there. The API server
// is asked about one claim after the other, and sooner about one that is in the way of another claim. No lock is held
// meanwhile.
func (m *Manager) ReleaseOrphans(ctx context.Context) {
	if m.orphans == nil {
		return
	}
	for ctx.Err() == nil {
		timer := time.NewTimer(m.orphans.checkNext(ctx))
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-m.orphans.inquiries.doubted:
		}
		timer.Stop()
	}
}

// checkNext asks about the claim that is due, if there is one, and returns how long to wait until the next.
func (o *orphans) checkNext(ctx context.Context) time.Duration {
	uids := o.store.UIDs()
	o.inquiries.update(uids, o.clock())
	o.retain(uids)
	uid, wait := o.inquiries.next(o.clock())
	if uid == "" {
		o.problem.Log(ctx, o.inquiries.problem(), "Not all claims are known to have their devices, will ask again",
			"All claims that were asked about have their devices")
		return wait
	}
	again, err := o.check(ctx, uid)
	if ctx.Err() == nil {
		o.inquiries.answered(uid, o.clock(), again, err)
	}
	return 0
}

// is tells the engine whether a claim that was prepared at this time is an orphan for long enough.
func (o *orphans) is(uid types.UID, prepared time.Duration) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	one, known := o.seen[uid]
	return known && one.confirmed && one.prepared == prepared
}

// doubt lets the claims be asked about that may be in the way of another one. Of a share any other claim may be the one that
// is gone.
func (o *orphans) doubt(other types.UID) {
	o.inquiries.doubt(other, o.clock())
	r, err := o.store.Read(other)
	if err != nil || r == nil {
		return // they are asked about some time in any case
	}
	for _, sharer := range o.store.Snapshot().Records {
		shares := slices.ContainsFunc(r.Devices, func(d record.Device) bool {
			return d.Type.IsShare() && slices.ContainsFunc(sharer.Devices, func(o record.Device) bool { return o.Device == d.Device })
		})
		if shares && sharer.State == record.Prepared {
			o.inquiries.doubt(sharer.Claim.UID, o.clock())
		}
	}
}

// note remembers whether a claim is an orphan, and returns for how long it has been.
func (o *orphans) note(r *record.Record, isOrphan bool) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !isOrphan {
		delete(o.seen, r.Claim.UID)
		return 0
	}
	now := o.clock()
	first, known := o.seen[r.Claim.UID]
	if !known || first.prepared != r.Arrived {
		first = orphan{prepared: r.Arrived, since: now}
		o.seen[r.Claim.UID] = first
	}
	return now - first.since
}

func (o *orphans) confirm(uid types.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	one := o.seen[uid]
	one.confirmed = true
	o.seen[uid] = one
}

// retain forgets all other claims.
func (o *orphans) retain(uids []types.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	keepOnly(o.seen, uids)
}

// check asks the API server about a prepared claim, and lets it be released if it has not had its devices for long enough.
// It returns when to ask again if that is known, as time from now.
func (o *orphans) check(ctx context.Context, uid types.UID) (again time.Duration, err error) {
	defer panics.Recover(ctx, &err)
	ctx = klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "claimUID", uid))
	r, err := o.store.Read(uid)
	if err != nil || r == nil || r.State != record.Prepared {
		return 0, nil // Reconcile finds the same
	}
	claim, err := o.cluster.Claim(ctx, r.Claim)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errUnknown, err)
	}
	hasDevices := claim != nil && o.isAllocated(claim, r)
	age := o.note(r, !hasDevices)
	gone := claim == nil && r.BootID != o.store.Boot()
	switch {
	case hasDevices:
		return 0, nil
	case !gone && age < o.grace:
		return o.grace - age, nil
	}
	o.confirm(uid)
	if err := o.release(ctx, r); err != nil {
		return 0, fmt.Errorf("claim %s: %w", uid, err)
	}
	return 0, nil
}

// isAllocated reports whether the claim still has a device of the record: the kubelet may have lost its state and never
// release a claim that was deallocated meanwhile.
func (o *orphans) isAllocated(claim *resourceapi.ResourceClaim, r *record.Record) bool {
	if claim.Status.Allocation == nil {
		return false
	}
	return slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
		return result.Driver == o.driver && result.Pool == o.pool && slices.ContainsFunc(r.Devices, func(d record.Device) bool {
			return d.Device == result.Device && ptr.Equal(d.ShareID, result.ShareID)
		})
	})
}

// release lets the rules release an orphan, unless processes use it. It may have been released, or prepared anew, since the
// API server was asked: then the rules do not take it for an orphan.
func (o *orphans) release(ctx context.Context, r *record.Record) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTime)
	defer cancel()
	var errs []error
	for _, address := range r.GPUs() {
		said, err := o.engine.Converge(ctx, address)
		errs = append(errs, err)
		if said == nil {
			continue
		}
		if v, found := said.Verdict(r.Claim.UID); found && v.Why != "" {
			errs = append(errs, errors.New(v.Why))
			if v.Code == rules.InUse {
				o.events.once(ctx, r.Claim, ReasonOrphanInUse, "", fmt.Sprintf(
					"The claim %s does not have its devices any more and is kept, because %s", r.Claim, v.Why))
			}
		}
	}
	now, err := o.store.Read(r.Claim.UID)
	if err == nil && (now == nil || now.State == record.Releasing) {
		klog.FromContext(ctx).Info("A claim that does not have its devices any more is released", "claim", r.Claim)
		o.events.once(ctx, r.Claim, ReasonOrphanReleased, "", "The claim "+r.Claim.String()+
			" does not exist any more, or is not allocated here, so its devices were released without the kubelet.")
		if now == nil {
			return nil
		}
	}
	return errors.Join(errs...)
}
