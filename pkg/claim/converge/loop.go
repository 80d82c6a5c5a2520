// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/panics"
	"github.com/partage-dev/partage/pkg/sharing"
	"github.com/partage-dev/partage/pkg/steptime"
	"github.com/partage-dev/partage/pkg/wait"
)

const (
	// waitTime bounds the wait for a place that another claim, or a process, still has.
	waitTime = 15 * time.Second
	// undoTime bounds what is undone after a failure. It is granted on top of the caller's deadline, which may be why the
	// call failed.
	undoTime = 30 * time.Second
	// recordPoll is how often it is looked whether a place is free: another process may free it.
	recordPoll = 200 * time.Millisecond
	// hardwarePoll is the same where no claim is in the way: looking takes more then.
	hardwarePoll = time.Second
	// maxRounds is more than any GPU needs that does not change under its claims all the time.
	maxRounds = 100
)

// pauses are the waits between attempts that fail for a reason that may pass. The kubelet gives a call 45 seconds and
// comes back only after a minute.
var pauses = []time.Duration{200 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second}

// Prepare brings a claim to what its call wants, completely or not at all: what was made of a claim that was not prepared
// before is undone before the call returns, and what cannot be undone stays written down. The caller has the claim's
// lock. Errors name the device and wrap a *VerdictError, or what the hardware says.
func (e *Engine) Prepare(ctx context.Context, c *Call) (*record.Record, error) {
	if err := e.releaseOther(ctx, c); err != nil {
		return nil, err
	}
	limited, stop := context.WithCancel(ctx)
	defer stop()
	c.stop = stop
	e.begin(c)
	err := e.prepare(limited, c)
	e.end(c)
	if r := e.preparedBy(c); r != nil {
		return r, nil // also where the last write says that it has failed, and has not
	}
	if err != nil && e.Store.Released(c.Wanted.Claim.UID, c.Wanted.Arrived) {
		err = record.ErrOutOfDate
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
		defer cancel()
		if left := e.Finish(undo, c.Wanted.Claim.UID, c.Wanted.GPUs()); left != nil {
			err = errors.Join(err, fmt.Errorf("undo: %w", left))
		}
		return nil, err
	}
	r, err := e.Store.Read(c.Wanted.Claim.UID)
	if err == nil && (r == nil || r.State != record.Prepared) {
		err = errors.New("the claim was released meanwhile")
	}
	return r, err
}

// preparedBy returns the record that a call has written when all of the claim was there, or nil.
func (e *Engine) preparedBy(c *Call) *record.Record {
	r, err := e.Store.Read(c.Wanted.Claim.UID)
	if err != nil || r == nil || r.BootID != e.Store.Boot() || r.State != record.Prepared || r.Arrived != c.Wanted.Arrived {
		return nil
	}
	return r
}

// releaseOther lets go of what the claim has that is not what it wants now: it was allocated anew. That is a release like
// any other, older than this call, so that it waits for processes that still use it. What is on GPUs that the call does
// not work on ends here.
func (e *Engine) releaseOther(ctx context.Context, c *Call) error {
	uid := c.Wanted.Claim.UID
	r, err := e.Store.Read(uid)
	if err != nil || r == nil || r.BootID != e.Store.Boot() || r.State != record.Releasing && sameWish(r, c.Wanted) {
		return nil //nolint:nilerr // a record that cannot be read is guarded
	}
	if r.State != record.Releasing {
		if r.Arrived >= c.Wanted.Arrived {
			return record.ErrOutOfDate
		}
		_, err = e.Store.Release(uid, r.Arrived+1)
	}
	if err == nil {
		gpus := slices.DeleteFunc(r.GPUs(), func(address string) bool { return hasGPU(c.Wanted, address) })
		err = e.Finish(ctx, uid, gpus)
	}
	if err != nil {
		return fmt.Errorf("release what the claim had before: %w", err)
	}
	return nil
}

func (e *Engine) prepare(ctx context.Context, c *Call) error {
	claim, gpus := c.Wanted.Claim.UID, c.Wanted.GPUs()
	for range maxRounds {
		limited, cancel := context.WithCancel(ctx)
		errs := make([]error, len(gpus))
		var wg sync.WaitGroup
		for i, address := range gpus {
			wg.Go(func() {
				if errs[i] = e.prepareOn(limited, claim, address); errs[i] != nil {
					cancel() // the others of the claim need not go on
				}
			})
		}
		wg.Wait()
		cancel()
		if err := firstCause(errs); err != nil || len(gpus) == 1 {
			return err
		}
		done, err := e.prepareJointly(ctx, claim, gpus)
		if done || err != nil {
			return err
		}
	}
	return errors.New("the GPUs of the claim change all the time")
}

// firstCause leaves out the GPUs that were stopped because of another one.
func firstCause(errs []error) error {
	causes := slices.DeleteFunc(slices.Clone(errs), func(err error) bool { return err == nil || errors.Is(err, context.Canceled) })
	if len(causes) > 0 {
		return errors.Join(causes...)
	}
	return errors.Join(errs...)
}

// prepareJointly carries out what all GPUs of a claim propose at once. It reports whether the claim is prepared.
func (e *Engine) prepareJointly(ctx context.Context, claim types.UID, gpus []string) (done bool, err error) {
	defer panics.Recover(ctx, &err)
	r, err := e.once(ctx, claim, gpu.SortPCIAddresses(slices.Clone(gpus)), jointTask(claim, gpus))
	switch {
	case err != nil:
		return false, err
	case r.err != nil:
		return false, r.err
	case r.task != nil:
		return r.task.Aim == rules.Commit, nil
	}
	for _, address := range gpus {
		if v, _ := r.verdict(claim, address); v.State != rules.Complete {
			return false, nil
		}
	}
	return true, nil
}

// prepareOn brings a claim as far as it gets on one GPU alone: until it is prepared, or all of its GPUs have to agree.
func (e *Engine) prepareOn(ctx context.Context, claim types.UID, address string) (err error) {
	defer panics.Recover(ctx, &err)
	failed := 0
	waitsFor := ""
	var waited *VerdictError
	deadline := time.Now().Add(waitTime)
	for range maxRounds {
		if e.isOutOfDate(claim) {
			return record.ErrOutOfDate
		}
		changed := e.Store.Changed()
		r, err := e.once(ctx, claim, []string{address}, ownTask(claim, address))
		if err != nil {
			return saysMore(ctx, waited, err)
		}
		v, _ := r.verdict(claim, address)
		switch own := r.task != nil && r.task.Claim == claim; {
		case v.State == rules.Waiting && (r.err == nil || !own):
			if v.Why != waitsFor {
				waitsFor = v.Why
				e.beginWait(ctx, v)
			}
			waited = &VerdictError{Verdict: v, waited: true}
			if !e.waitForPlace(ctx, changed, deadline, v) {
				return waited
			}
		case isFinal(v) || r.err != nil:
			err := cmp.Or(r.err, error(&VerdictError{Verdict: v, cause: r.unanswered[address]}))
			if failed++; !e.mayRetry(ctx, failed, err) {
				return tried(failed, err)
			}
		case r.task == nil, r.task.Aim == rules.Commit:
			return nil // it is prepared, or all of its GPUs have to agree
		}
	}
	return fmt.Errorf("GPU %s changes all the time", address)
}

// saysMore is what a call waited for, if its time is over meanwhile.
func saysMore(ctx context.Context, waited *VerdictError, err error) error {
	if waited != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return waited
	}
	return err
}

// isOutOfDate reports whether a claim was released after its call had arrived.
func (e *Engine) isOutOfDate(claim types.UID) bool {
	c := e.call(claim)
	return c != nil && e.Store.Released(claim, c.Wanted.Arrived)
}

// isFinal reports whether a claim cannot get on.
func isFinal(v rules.Verdict) bool {
	return v.State == rules.Refused || v.State == rules.Unknown || v.State == rules.Pending
}

// mayRetry waits before another attempt, if there is to be one.
func (e *Engine) mayRetry(ctx context.Context, failed int, err error) bool {
	if !transient(err) || failed > len(pauses) || e.pause(ctx, pauses[failed-1]) != nil {
		return false
	}
	klog.FromContext(ctx).Info("Trying again", "tried", failed, "reason", err)
	return true
}

func tried(failed int, err error) error {
	if failed == 1 {
		return err
	}
	return fmt.Errorf("tried %d times: %w", failed, err)
}

// transient reports whether another attempt may succeed.
func transient(err error) bool {
	if verdict := (*VerdictError)(nil); errors.As(err, &verdict) && verdict.Code != rules.Unanswered {
		return false
	}
	return !errors.Is(err, gpu.ErrHung) && (gpu.Transient(err) || errors.Is(err, sharing.ErrNoSupervisor))
}

// beginWait says what a claim waits for.
func (e *Engine) beginWait(ctx context.Context, v rules.Verdict) {
	klog.FromContext(ctx).Info("Waiting", "reason", v.Why)
	if v.Other != "" && e.Doubt != nil {
		e.Doubt(v.Other)
	}
}

func (e *Engine) pause(ctx context.Context, d time.Duration) error {
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	return wait.For(ctx, d)
}

// waitForPlace waits until something may have changed, and returns false when the time for that is over. After a pod was
// deleted by force, its devices are allocated again before they are released.
func (e *Engine) waitForPlace(ctx context.Context, changed <-chan struct{}, deadline time.Time, v rules.Verdict) bool {
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	if time.Now().After(deadline) {
		return false
	}
	poll := recordPoll
	if v.Other == "" {
		poll = hardwarePoll
	}
	timer := time.NewTimer(poll)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-changed:
	case <-timer.C:
	}
	return ctx.Err() == nil
}

// Finish brings the release of a claim, or the undoing of a preparation, to its end on these GPUs, and returns what is
// left. GPUs do not wait for each other, nor does this for a preparation that is older than the release.
func (e *Engine) Finish(ctx context.Context, claim types.UID, gpus []string) error {
	if c := e.call(claim); c != nil && e.Store.Released(claim, c.Wanted.Arrived) {
		c.stop()
	}
	errs := make([]error, len(gpus))
	var wg sync.WaitGroup
	for i, address := range gpus {
		wg.Go(func() { errs[i] = e.finishOn(ctx, claim, address) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (e *Engine) finishOn(ctx context.Context, claim types.UID, address string) (err error) {
	defer panics.Recover(ctx, &err)
	last := ""
	for failed := 0; ; {
		r, err := e.once(ctx, claim, []string{address}, releaseOf(claim, address))
		if err != nil {
			return err
		}
		switch {
		case r.err != nil:
			if failed++; !e.mayRetry(ctx, failed, r.err) {
				return tried(failed, r.err)
			}
		case r.task == nil || taskName(r.task) == last: // what it was about stays: a CDI spec that cannot be removed
			if v, found := r.verdict(claim, address); found && (v.State == rules.Pending || v.State == rules.Unknown) && e.isLeaving(claim) {
				return &VerdictError{Verdict: v, cause: r.unanswered[address]}
			}
			return nil
		default:
			last = taskName(r.task)
		}
	}
}

// isLeaving reports whether a claim has something that has to go.
func (e *Engine) isLeaving(claim types.UID) bool {
	r, err := e.Store.Read(claim)
	return err == nil && r != nil && r.State != record.Prepared
}

func releaseOf(claim types.UID, address string) choose {
	return func(plans map[string]*rules.Plan) *rules.Task {
		for i := range plans[address].Tasks {
			if t := &plans[address].Tasks[i]; t.Claim == claim && t.Aim == rules.Release {
				return complete(t)
			}
		}
		return nil
	}
}
