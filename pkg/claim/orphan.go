// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/panics"
)

// DefaultCheckInterval is in what time the API server is asked about each prepared claim
// once. A cluster with 5,000 nodes and 56 claims on each gets 233 requests per second.
const DefaultCheckInterval = 20 * time.Minute

const (
	// doubtPause is the time between two questions that are asked besides the regular
	// ones, on average, and also between two about one claim. Where every node has doubts
	// all the time, the cluster above gets 67 more requests per second.
	doubtPause = 75 * time.Second
	// inquiryBurst is how many questions may be asked at once.
	inquiryBurst = 8
	// inquiryJitter is by which part of the interval it may be longer.
	inquiryJitter = 0.1
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
	// doubted has something when a claim is to be asked about sooner.
	doubted chan struct{}

	mu     sync.Mutex
	claims map[types.UID]inquiry
}

// inquiry is what is known about a claim that is asked about.
type inquiry struct {
	// asked is when it was asked about last, and due when it will be next.
	asked, due time.Time
	// since is when it was first seen not to have its devices, as it was prepared at one time, or zero: it may be prepared
	// anew. confirmed means that this is so for long enough, and is being acted on.
	prepared, since time.Duration
	confirmed       bool
	// kept says why it could not be released.
	kept *Statement
}

func newOrphans(m *Manager, o Options) *orphans {
	return &orphans{
		m: m, cluster: o.Cluster, grace: cmp.Or(o.OrphanGrace, DefaultOrphanGrace), interval: cmp.Or(o.CheckInterval, DefaultCheckInterval),
		budget: rate.NewLimiter(0, inquiryBurst), doubted: make(chan struct{}, 1), claims: map[types.UID]inquiry{},
	}
}

// ReleaseOrphans releases prepared claims that do not have their devices any more, until ctx ends: they were deleted, or
// deallocated, and the kubelet has not released them itself, because it has lost its state or was not there. The API server
// is asked about one claim after the other, and sooner about one that is in the way of another claim. No lock is held
// meanwhile. It is called once.
func (m *Manager) ReleaseOrphans(ctx context.Context) {
	o := m.orphans
	// The claims that a plugin finds have been there for any time: they are asked about one after the other during the
	// interval, since on other nodes plugins may be starting too. Others have just been prepared.
	after := func() time.Duration { return rand.N(o.interval) } //nolint:gosec // no secret
	for ctx.Err() == nil {
		o.count(after)
		after = o.regular
		uid, due := o.next()
		select {
		case <-ctx.Done():
		case <-o.doubted:
		case <-time.After(time.Until(due)):
			if uid != "" {
				o.ask(ctx, uid)
			}
		}
	}
}

// regular is the time between two questions about a claim that has its devices.
func (o *orphans) regular() time.Duration { return wait.Jitter(o.interval, inquiryJitter) }

// next returns the claim that is asked about next, and when, or none where claims are to be counted again before.
func (o *orphans) next() (next types.UID, due time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	due = time.Now().Add(o.interval / 10)
	for uid, i := range o.claims {
		if i.due.Before(due) {
			next, due = uid, i.due
		}
	}
	return next, due
}

// count finds out which claims are prepared, if that can be read. New ones are asked about after a time.
func (o *orphans) count(after func() time.Duration) {
	known := o.m.store.Snapshot()
	if known.Err != nil {
		return // what is known of those that are not seen stays; cleaning up says why
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	prepared := map[types.UID]bool{}
	for _, r := range known.All() {
		if r.State != record.Prepared {
			continue
		}
		prepared[r.Claim.UID] = true
		if _, known := o.claims[r.Claim.UID]; !known {
			o.claims[r.Claim.UID] = inquiry{due: time.Now().Add(after())}
		}
	}
	maps.DeleteFunc(o.claims, func(uid types.UID, _ inquiry) bool { return !prepared[uid] })
	o.budget.SetLimit(rate.Limit(float64(len(prepared))/o.interval.Seconds() + 1/doubtPause.Seconds()))
}

// ask asks about a claim when the budget lets it, and says when its next turn is.
func (o *orphans) ask(ctx context.Context, uid types.UID) {
	again := min(o.interval, doubtPause)
	defer func() { o.note(uid, func(i *inquiry) { i.due = time.Now().Add(again) }) }()
	r, err := o.m.store.Read(uid)
	if err != nil || r == nil || o.budget.Wait(ctx) != nil {
		return // its record has just gone, or cannot be read
	}
	o.note(uid, func(i *inquiry) { i.asked = time.Now() })
	pause, err := o.check(ctx, r)
	switch {
	case ctx.Err() != nil:
	case pause > 0:
		again = pause
		o.problem.Log(ctx, err, "Claims are left alone, will ask again", "It is known again which claims still exist")
	default:
		klog.FromContext(ctx).Info("A claim could not be released that does not have its devices any more, will try again", "claim", r.Claim, "reason", err)
	}
}

// doubt lets the claims be asked about at once that may be in the way of another one. Of a share any other claim may be the
// one that is gone. It asks nobody itself.
func (o *orphans) doubt(other types.UID) {
	r, err := o.m.store.Read(other)
	if err != nil || r == nil {
		return // there is nothing to ask about
	}
	for _, one := range o.m.store.Snapshot().Records {
		shares := slices.ContainsFunc(r.Devices, func(d record.Device) bool {
			return d.Type.IsShare() && slices.ContainsFunc(one.Devices, func(o record.Device) bool { return o.Device == d.Device })
		})
		if shares || one.Claim.UID == other {
			o.note(one.Claim.UID, func(i *inquiry) {
				if at := i.asked.Add(doubtPause); at.Before(i.due) {
					i.due = at
				}
			})
		}
	}
	select {
	case o.doubted <- struct{}{}:
	default:
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
	case err != nil && i.since > 0:
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
		i.prepared, i.since, i.kept = 0, 0, nil
	case i.since == 0 || i.prepared != r.Arrived:
		i.prepared, i.since, i.kept = r.Arrived, now, nil
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

// release lets the rules release an orphan, unless processes use it. They take it for one only now that the API server has
// said so: what it says later counts then. The claim may have been released, or prepared anew, since it was asked.
func (o *orphans) release(ctx context.Context, r *record.Record) error {
	if now, err := o.m.store.Read(r.Claim.UID); err != nil || now == nil || now.State != record.Prepared || now.Arrived != r.Arrived {
		return err
	}
	o.note(r.Claim.UID, func(i *inquiry) { i.confirmed = true })
	defer o.note(r.Claim.UID, func(i *inquiry) { i.confirmed = false })
	ctx, cancel := context.WithTimeout(ctx, orphanTime)
	defer cancel()
	var errs []error
	var kept *Statement
	for _, address := range r.GPUs() {
		said, err := o.m.converge(ctx, address)
		errs = append(errs, err)
		if at := slices.IndexFunc(said.Statements, func(s rules.Statement) bool { return s.Reason == rules.OrphanInUse && s.Claim == r.Claim.UID }); at >= 0 {
			kept = &Statement{Claim: r.Claim, Reason: ReasonOrphanInUse, Text: said.Statements[at].Text}
		}
	}
	o.note(r.Claim.UID, func(i *inquiry) { i.kept = kept })
	now, err := o.m.store.Read(r.Claim.UID)
	if err != nil || now != nil && now.State != record.Releasing {
		return cmp.Or(errors.Join(errs...), err, errors.New("a call is at work on its GPUs"))
	}
	klog.FromContext(ctx).Info("A claim that does not have its devices any more is released", "claim", r.Claim)
	o.m.events.Warn(ctx, r.Claim, ReasonOrphanReleased, "The claim "+r.Claim.String()+
		" does not exist any more, or is not allocated here, so its devices were released without the kubelet.")
	return nil
}

// statements say which claims are kept.
func (o *orphans) statements() (all []Statement) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, i := range o.claims {
		if i.kept != nil {
			all = append(all, *i.kept)
		}
	}
	return all
}
