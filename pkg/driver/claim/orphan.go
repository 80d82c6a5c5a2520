// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/panics"
)

// Cluster is what the API server knows of claims.
type Cluster interface {
	// Claim returns the claim with this UID, or nil if there is none. An error means that this is not known now.
	Claim(ctx context.Context, claim Ref) (*resourceapi.ResourceClaim, error)
}

const (
	// DefaultOrphanGrace is twice the time in which the kubelet looks for pods that are gone.
	DefaultOrphanGrace = 2 * time.Minute
	// DefaultCheckInterval is in what time the API server is asked about each prepared claim
	// once. A cluster with 5,000 nodes and 56 claims on each gets 233 requests per second.
	DefaultCheckInterval = 20 * time.Minute
	// recheckPause is the time between two questions that are asked besides the regular
	// ones, on average, and also between two about one claim. Where every node rechecks
	// all the time, the cluster above gets 67 more requests per second.
	recheckPause = 75 * time.Second
	// inquiryBurst is how many questions may be asked at once.
	inquiryBurst = 8
	// orphanTime bounds the release of an orphan. What is left is tried again.
	orphanTime = 30 * time.Second
)

// orphans are prepared claims that do not exist any more, or that are not allocated here: they were deleted, or deallocated, and
// the kubelet has not released them itself, because it has lost its state or was not there. A pod that is deleted by force
// takes its claim with it before the kubelet has stopped its containers, so the kubelet gets time to release the claim itself.
type orphans struct {
	engine          *converge.Engine
	cluster         Cluster
	pods            func(ctx context.Context, claim Ref) (string, error)
	driver, pool    string
	grace, interval time.Duration
	problem         logchange.Problem
	// budget is how often the API server may be asked.
	budget *rate.Limiter
	// rechecks has something when a claim is to be asked about sooner.
	rechecks chan struct{}

	mu     sync.Mutex
	claims map[types.UID]inquiry
}

// inquiry is what is known about a claim that is asked about.
type inquiry struct {
	// asked is when it was asked about last, and due when it will be next.
	asked, due time.Time
	// since is when it was first seen not to have its devices, as it was prepared at one time, or zero: it may be prepared
	// anew.
	prepared, since time.Duration
	// kept says why it could not be released.
	kept *Statement
}

// run asks about one claim after the other, and sooner about one that is in the way of another claim, until ctx ends. No lock is
// held meanwhile.
func (o *orphans) run(ctx context.Context) {
	for ctx.Err() == nil {
		r, due := o.next()
		select {
		case <-ctx.Done():
		case <-o.rechecks:
		case <-time.After(time.Until(due)):
			if r != nil {
				o.ask(ctx, r)
			}
		}
	}
}

// next returns the prepared claim that is asked about next, and when, or none where the records are read again before that.
// New ones, and those that a plugin finds, are asked about one after the other during the interval: on other nodes plugins may be
// starting too.
func (o *orphans) next() (next *record.Record, due time.Time) {
	due = time.Now().Add(o.interval / 10)
	snapshot := o.engine.Store.Snapshot()
	if snapshot.Err != nil {
		return nil, due // what is known of those that are not seen stays; cleaning up says why
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.claims
	o.claims = map[types.UID]inquiry{}
	for _, r := range snapshot.All() {
		if r.State != record.Prepared {
			continue
		}
		i, known := before[r.Claim.UID]
		if !known {
			i.due = time.Now().Add(rand.N(o.interval)) //nolint:gosec // no secret
		}
		if i.prepared != r.Arrived {
			i.prepared, i.since, i.kept = r.Arrived, 0, nil
		}
		o.claims[r.Claim.UID] = i
		if i.due.Before(due) {
			next, due = r, i.due
		}
	}
	o.budget.SetLimit(rate.Limit(float64(len(o.claims))/o.interval.Seconds() + 1/recheckPause.Seconds()))
	return next, due
}

// ask asks about a claim when the budget lets it, and says when its next turn is.
func (o *orphans) ask(ctx context.Context, r *record.Record) {
	if o.budget.Wait(ctx) != nil {
		return
	}
	o.note(r.Claim.UID, func(i *inquiry) { i.asked = time.Now() })
	again, err := o.check(ctx, r)
	switch {
	case ctx.Err() != nil:
	case again > 0:
		o.problem.Log(ctx, err, "Claims are left alone, will ask again", "It is known again which claims still exist")
	default:
		again = min(o.interval, recheckPause)
		klog.FromContext(ctx).Info("A claim could not be released that does not have its devices any more, will try again", "claim", r.Claim, "reason", err)
	}
	o.note(r.Claim.UID, func(i *inquiry) { i.due = time.Now().Add(again) })
}

// recheck lets the claims be asked about at once that may be in the way of another one. Of a share any other claim may be the
// one that is gone. It asks nobody itself.
func (o *orphans) recheck(other types.UID) {
	snapshot := o.engine.Store.Snapshot()
	r := snapshot.Of(other)
	if r == nil {
		return // there is nothing to ask about
	}
	has := func(d record.Device) bool {
		return slices.ContainsFunc(r.Devices, func(other record.Device) bool { return other.Device == d.Device })
	}
	for _, one := range snapshot.Records {
		if slices.ContainsFunc(one.Devices, has) {
			o.note(one.Claim.UID, func(i *inquiry) {
				if at := i.asked.Add(recheckPause); at.Before(i.due) {
					i.due = at
				}
			})
		}
	}
	select {
	case o.rechecks <- struct{}{}:
	default:
	}
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
	asked := o.engine.Clock()
	claim, err := o.cluster.Claim(ctx, r.Claim)
	if err != nil {
		err = fmt.Errorf("it is not known which claims still exist: %w", err)
	}
	now := o.engine.Clock()
	since := o.note(r.Claim.UID, func(i *inquiry) {
		switch {
		case err != nil:
		case claim != nil && o.isAllocated(claim, r):
			i.since, i.kept = 0, nil
		case i.since == 0:
			i.since = now
		}
	}).since
	switch left := since + o.grace - now; {
	case err != nil && since > 0:
		return min(o.interval, recheckPause), err
	case err != nil || since == 0:
		// An API server that fails is asked no more often than any other. A claim that is in the way is rechecked again.
		return o.interval, err
	case left > 0:
		return left, nil
	}
	if err := o.release(ctx, r, asked); err != nil {
		return 0, fmt.Errorf("claim %s: %w", r.Claim.UID, err)
	}
	return o.interval, nil
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

// release releases an orphan as the kubelet would, unless processes use it, or a call is at work with it. The claim may have been
// released, or prepared anew, since the API server was asked.
func (o *orphans) release(ctx context.Context, r *record.Record, asked time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, orphanTime)
	defer cancel()
	unlock, err := o.engine.Locks.TryClaim(r.Claim.UID)
	if err != nil {
		return fmt.Errorf("a call is at work with it: %w", err)
	}
	defer unlock()
	if now, err := o.engine.Store.Read(r.Claim.UID); err != nil || now == nil || now.State != record.Prepared || now.Arrived != r.Arrived {
		return err
	}
	if r.BootID == o.engine.Store.Boot() {
		if err := o.keep(ctx, r); err != nil {
			return err
		}
	}
	if err := release(ctx, o.engine, r.Claim.UID, asked); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("A claim that does not have its devices any more is released", "claim", r.Claim)
	o.engine.Warn(ctx, r.Claim, ReasonOrphanReleased, "The claim "+r.Claim.String()+
		" does not exist any more, or is not allocated here, so its devices were released without the kubelet.")
	return nil
}

// keep returns which pods or processes keep an orphan, or why that is not known yet. What it has on a GPU that hangs, is lost, or
// has to be reset is released when that answers again, and does not keep the rest.
func (o *orphans) keep(ctx context.Context, r *record.Record) (err error) {
	var kept *Statement
	keep := func(because string) {
		text := fmt.Sprintf("claim %s does not have its devices any more and is kept, because %s", r.Claim, because)
		kept, err = &Statement{Claim: r.Claim, Reason: ReasonOrphanInUse, Text: text}, errors.New(text)
	}
	pods, err := o.pods(ctx, r.Claim)
	if pods != "" {
		keep("these may still have them: " + pods)
	}
	for _, address := range r.GPUs() {
		used, failed := o.engine.UsersOf(ctx, r, address)
		switch {
		case used != "":
			keep("processes use " + used)
		case failed != nil && !isOut(failed):
			err = cmp.Or(err, failed)
		}
	}
	if kept != nil || err == nil { // what was known last still counts
		o.note(r.Claim.UID, func(i *inquiry) { i.kept = kept })
	}
	return err
}

// isOut reports whether a GPU is not expected to answer soon.
func isOut(err error) bool {
	return errors.Is(err, gpu.ErrHung) || errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrNotFound) || errors.Is(err, gpu.ErrResetRequired)
}

// kept says which claims are kept, and which devices the scheduler takes for free meanwhile. Of a device that claims share it may give
// out the rest.
func (o *orphans) kept(snapshot *record.Snapshot) (s gpuStatus) {
	s.observed = true
	o.mu.Lock()
	defer o.mu.Unlock()
	for uid, i := range o.claims {
		r := snapshot.Of(uid)
		if i.kept == nil || r == nil || r.State != record.Prepared || r.Arrived != i.prepared {
			continue
		}
		s.claims = append(s.claims, *i.kept)
		for _, d := range r.Devices {
			if !d.Admin && !d.Type.IsShare() {
				s.conditions = append(s.conditions, pending(&d, i.kept.Text))
			}
		}
	}
	return s
}
