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

	"golang.org/x/time/rate"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/panics"
)

// orphans are prepared claims that do not exist any more, or that are not allocated here. A pod that is deleted by force
// takes its claim with it before the kubelet has stopped its containers, so the kubelet gets time to release the claim
// itself.
type orphans struct {
	m               *Manager
	cluster         Cluster
	grace, interval time.Duration
	problem         logchange.Problem
	// budget is how often the API server may be asked.
	budget *rate.Limiter

	mu sync.Mutex
	// queue are the claims to ask about, or nil before that begins.
	queue  workqueue.TypedRateLimitingInterface[types.UID]
	claims map[types.UID]inquiry
}

// inquiry is what is known about a claim that is asked about.
type inquiry struct {
	// asked is when it is asked about, or was last.
	asked time.Time
	// since is when it was first seen not to have its devices, as it was prepared at one time, or zero: it may be prepared
	// anew. confirmed means that this is so for long enough.
	prepared, since time.Duration
	confirmed       bool
}

func newOrphans(m *Manager, o Options) *orphans {
	return &orphans{
		m: m, cluster: o.Cluster, grace: cmp.Or(o.OrphanGrace, DefaultOrphanGrace), interval: cmp.Or(o.CheckInterval, DefaultCheckInterval),
		budget: rate.NewLimiter(0, inquiryBurst), claims: map[types.UID]inquiry{},
	}
}

// is tells the engine whether a claim that was prepared at this time is an orphan for long enough.
func (o *orphans) is(uid types.UID, prepared time.Duration) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	i := o.claims[uid]
	return i.confirmed && i.prepared == prepared
}

// note changes what is known about a claim, and returns it.
func (o *orphans) note(uid types.UID, change func(*inquiry)) inquiry {
	o.mu.Lock()
	defer o.mu.Unlock()
	i := o.claims[uid]
	change(&i)
	o.claims[uid] = i
	return i
}

// check asks the API server about a prepared claim, and lets it be released if it has not had its devices for long enough.
// It returns after which time to ask again, unless the claim could not be released.
func (o *orphans) check(ctx context.Context, r *record.Record) (again time.Duration, err error) {
	defer panics.Recover(ctx, &err)
	ctx = klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "claimUID", r.Claim.UID))
	claim, err := o.cluster.Claim(ctx, r.Claim)
	if err != nil {
		err = fmt.Errorf("it is not known which claims still exist: %w", err)
	}
	now := o.m.clock()
	i := o.note(r.Claim.UID, func(i *inquiry) {
		if err == nil {
			i.answered(r, claim == nil || !o.isAllocated(claim, r), now)
		}
	})
	left := i.since + o.grace - now
	switch gone := claim == nil && r.BootID != o.m.store.Boot(); {
	case err != nil && i.since > 0 && !i.confirmed:
		return min(o.interval, doubtPause), err
	case err != nil || i.since == 0:
		// An API server in trouble is asked no more often than any other. A claim that is in the way is doubted again.
		return o.regular(), err
	case left > 0 && !gone:
		return left, nil
	}
	if err := o.release(ctx, r); err != nil {
		return 0, fmt.Errorf("claim %s: %w", r.Claim.UID, err)
	}
	return o.regular(), nil
}

// answered notes whether the claim, as it was prepared, has its devices.
func (i *inquiry) answered(r *record.Record, isOrphan bool, now time.Duration) {
	switch {
	case !isOrphan:
		*i = inquiry{asked: i.asked}
	case i.since == 0 || i.prepared != r.Arrived:
		*i = inquiry{asked: i.asked, prepared: r.Arrived, since: now}
	}
}

// isAllocated reports whether the claim still has a device of the record: the kubelet may have lost its state and never
// release a claim that was deallocated meanwhile.
func (o *orphans) isAllocated(claim *resourceapi.ResourceClaim, r *record.Record) bool {
	if claim.Status.Allocation == nil {
		return false
	}
	return slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
		return result.Driver == o.m.driver && result.Pool == o.m.pool && slices.ContainsFunc(r.Devices, func(d record.Device) bool {
			return d.Device == result.Device && ptr.Equal(d.ShareID, result.ShareID)
		})
	})
}

// release lets the rules release an orphan, unless processes use it. It may have been released, or prepared anew, since the
// API server was asked: then the rules do not take it for an orphan.
func (o *orphans) release(ctx context.Context, r *record.Record) error {
	o.note(r.Claim.UID, func(i *inquiry) { i.confirmed = true })
	ctx, cancel := context.WithTimeout(ctx, sweepTime)
	defer cancel()
	var errs []error
	for _, address := range r.GPUs() {
		errs = append(errs, o.m.reconcile(ctx, address))
	}
	now, err := o.m.store.Read(r.Claim.UID)
	if err != nil || now != nil && now.State != record.Releasing {
		return cmp.Or(errors.Join(errs...), err, errors.New("a call is at work on its GPUs"))
	}
	klog.FromContext(ctx).Info("A claim that does not have its devices any more is released", "claim", r.Claim)
	o.m.events.once(ctx, r.Claim, ReasonOrphanReleased, "", "The claim "+r.Claim.String()+
		" does not exist any more, or is not allocated here, so its devices were released without the kubelet.")
	return nil
}
