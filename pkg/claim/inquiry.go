// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/record"
)

// DefaultCheckInterval is in what time the API server is asked about each prepared claim
// once. A cluster with 5,000 nodes and 56 claims on each gets 233 requests per second.
const DefaultCheckInterval = 20 * time.Minute

const (
	// doubtPause is the time between two questions that are asked besides the regular
	// ones, on average, and also between two about one claim. Where every node has doubts
	// all the time, the cluster above gets 67 more requests per second.
	doubtPause = 75 * time.Second
	// soon is when a claim that is in the way is asked about. At once would be besides its
	// turn in the queue, and not instead of it.
	soon = 100 * time.Millisecond
	// inquiryBurst is how many questions may be asked at once.
	inquiryBurst = 8
	// inquiryJitter is by which part of the interval it may be longer.
	inquiryJitter = 0.1
)

// ReleaseOrphans releases prepared claims that do not have their devices any more, until ctx ends: they were deleted, or
// deallocated, and the kubelet has not released them itself, because it has lost its state or was not there. The API server
// is asked about one claim after the other, and sooner about one that is in the way of another claim. No lock is held
// meanwhile. It is called once.
func (m *Manager) ReleaseOrphans(ctx context.Context) {
	o := m.orphans
	if o == nil {
		return
	}
	// The time until it is tried again to release an orphan doubles each time.
	retries := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](o.interval/40, o.interval/2)
	queue := workqueue.NewTypedRateLimitingQueue(retries)
	context.AfterFunc(ctx, queue.ShutDown)
	o.mu.Lock()
	o.queue = queue
	o.mu.Unlock()
	// The claims that a plugin finds have been there for any time: they are asked about one after the other during the
	// interval, since on other nodes plugins may be starting too. Others have just been prepared.
	o.recount(func() time.Duration { return rand.N(o.interval) }) //nolint:gosec // no secret
	go wait.UntilWithContext(ctx, func(context.Context) { o.recount(o.regular) }, o.interval/10)
	for {
		uid, ended := queue.Get()
		if ended || ctx.Err() != nil {
			return
		}
		o.ask(ctx, uid)
		queue.Done(uid)
	}
}

// regular is the time between two questions about a claim that has its devices.
func (o *orphans) regular() time.Duration { return wait.Jitter(o.interval, inquiryJitter) }

// recount finds out which claims there are, if that can be read. New ones are asked about after a time.
func (o *orphans) recount(after func() time.Duration) {
	uids, err := o.m.store.UIDs()
	if err != nil {
		return // what is known of those that are not seen stays; cleaning up says why
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, uid := range uids {
		if _, known := o.claims[uid]; !known {
			o.claims[uid] = inquiry{}
			o.queue.AddAfter(uid, after())
		}
	}
	keepOnly(o.claims, uids)
	o.budget.SetLimit(rate.Limit(float64(len(uids))/o.interval.Seconds() + 1/doubtPause.Seconds()))
}

// ask asks about a claim when the budget lets it, and says when its next turn is. One that is not prepared costs no question,
// and is found again if it is still there when claims are counted.
func (o *orphans) ask(ctx context.Context, uid types.UID) {
	r, err := o.m.store.Read(uid)
	if err != nil {
		o.queue.AddAfter(uid, doubtPause) // what is known of it stays
		return
	}
	if r == nil || r.State != record.Prepared {
		o.queue.Forget(uid)
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.claims, uid)
		return
	}
	pause := o.budget.Reserve().Delay()
	o.note(uid, func(i *inquiry) { i.asked = time.Now().Add(pause) })
	select {
	case <-ctx.Done():
		return
	case <-time.After(pause):
	}
	switch again, err := o.check(ctx, r); {
	case ctx.Err() != nil:
	case again > 0:
		o.queue.Forget(uid)
		o.queue.AddAfter(uid, again)
		o.problem.Log(ctx, err, "Claims are left alone, will ask again", "It is known again which claims still exist")
	default:
		o.queue.AddRateLimited(uid)
		klog.FromContext(ctx).Info("A claim could not be released that does not have its devices any more, will try again", "claim", r.Claim, "reason", err)
	}
}

// doubt lets the claims be asked about soon that may be in the way of another one. Of a share any other claim may be the one
// that is gone. It never blocks.
func (o *orphans) doubt(other types.UID) {
	r, err := o.m.store.Read(other)
	if err != nil || r == nil {
		return // there is nothing to ask about
	}
	all := o.m.store.Snapshot().Records
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, one := range all {
		shares := slices.ContainsFunc(r.Devices, func(d record.Device) bool {
			return d.Type.IsShare() && slices.ContainsFunc(one.Devices, func(o record.Device) bool { return o.Device == d.Device })
		})
		if uid := one.Claim.UID; o.queue != nil && (shares || uid == other) {
			o.queue.AddAfter(uid, max(soon, time.Until(o.claims[uid].asked.Add(doubtPause))))
		}
	}
}
