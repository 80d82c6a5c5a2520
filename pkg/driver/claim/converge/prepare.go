// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/panics"
	"github.com/partage-dev/partage/pkg/util/steptime"
)

const (
	// waitTime bounds the wait for a place that another claim, or a process, still has.
	waitTime = 15 * time.Second
	// undoTime bounds what is undone after a failure. It is granted on top of the caller's deadline, which may be why the
	// call failed.
	undoTime = 30 * time.Second
	// poll is how often a place is checked for being free: another process may free it.
	poll = time.Second
)

// Call is a Prepare that is at work.
type Call struct {
	// Wanted is the record that follows from the claim's allocation, without marks. Its Arrived is the time of the call.
	Wanted *record.Record
	// Was is the claim's record, as it was read under the claim's lock, or nil where there is none that can be read.
	Was *record.Record
	// engine is set, and stop ends the call, while it is at work.
	engine *Engine
	stop   context.CancelFunc
	// of has the devices that are wanted, and those that the claim had before.
	of *record.Record
}

// Prepare makes what a call wants for a claim, completely or not at all: if it fails, what was made for a claim that was not
// prepared before is undone, and what cannot be undone stays in the record. The caller has the claim's lock. Errors name the
// device and wrap a *rules.Verdict, or an error of the hardware.
func (e *Engine) Prepare(ctx context.Context, c *Call) (*record.Record, error) {
	claim := c.Wanted.Claim.UID
	limited, stop := context.WithCancel(ctx)
	defer stop()
	c.engine, c.stop = e, stop
	if err := c.releaseOther(ctx); err != nil {
		return nil, err
	}
	e.calls.Store(claim, c)
	err := c.prepare(limited)
	e.calls.CompareAndDelete(claim, c)
	r, readErr := e.Store.Read(claim)
	switch {
	case readErr == nil && c.isPrepared(r) && (err == nil || r.Arrived == c.Wanted.Arrived):
		return r, nil // also where the last write says that it has failed, and has not
	case err == nil && readErr != nil:
		return nil, readErr
	case err == nil, c.isOutOfDate():
		err = record.ErrOutOfDate // the claim was released meanwhile
	}
	if left := c.undo(ctx, r, readErr != nil); left != nil {
		err = errors.Join(err, fmt.Errorf("undo: %w", left))
	}
	return nil, err
}

// undo undoes what was made for a claim. Its record is r, or it has none, or, if unread, one that cannot be read.
func (c *Call) undo(ctx context.Context, r *record.Record, unread bool) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if r != nil || unread {
		err = c.engine.Finish(ctx, cmp.Or(r, c.Wanted), c.Wanted.GPUs())
	}
	if !unread && (r == nil || r.BootID != c.engine.Store.Boot()) {
		err = errors.Join(err, c.engine.Specs.Remove(ctx, c.Wanted.Claim.UID)) // it may be there before there is a record
	}
	return err
}

// isPrepared reports whether a record says that all of the claim is there.
func (c *Call) isPrepared(r *record.Record) bool {
	return r != nil && r.BootID == c.engine.Store.Boot() && r.State == record.Prepared
}

// isOutOfDate reports whether the claim was released after the call had arrived.
func (c *Call) isOutOfDate() bool {
	return c.engine.Store.Released(c.Wanted.Claim.UID, c.Wanted.Arrived)
}

// releaseOther releases what the claim has from another allocation than the present one. That is a release like any other,
// older than this call, and waits for processes that still use the devices. On GPUs that the call does not work on it is
// completed here.
func (c *Call) releaseOther(ctx context.Context) error {
	store, claim, r := c.engine.Store, c.Wanted.Claim.UID, c.Was
	c.of = c.Wanted
	if r == nil {
		return nil // one that cannot be read is guarded
	}
	c.of = &record.Record{
		Claim: r.Claim, Devices: slices.Concat(c.Wanted.Devices, r.Devices), Sessions: slices.Concat(c.Wanted.Sessions, r.Sessions),
	}
	if r.BootID != store.Boot() || r.State != record.Releasing && slices.Equal(wishOf(r), wishOf(c.Wanted)) {
		return nil
	}
	var err error
	if r.State != record.Releasing {
		if r.Arrived >= c.Wanted.Arrived {
			return record.ErrOutOfDate
		}
		_, err = store.Release(claim, r.Arrived+1)
	}
	if err == nil {
		err = c.engine.Finish(ctx, r, slices.DeleteFunc(r.GPUs(), func(address string) bool { return hasGPU(c.Wanted, address) }))
	}
	if err != nil {
		return fmt.Errorf("release what the claim had before: %w", err)
	}
	return nil
}

// prepare works on all GPUs at the same time, and then on all of them together, until the claim is prepared.
func (c *Call) prepare(ctx context.Context) error {
	var failed attempts
	gpus := c.Wanted.GPUs()
	for range maxRounds {
		failed.begin()
		all, limited := errgroup.WithContext(ctx) // where one GPU fails the others need not go on
		for _, address := range gpus {
			all.Go(func() error { return c.prepareOn(limited, address) })
		}
		if err := all.Wait(); err != nil || len(gpus) == 1 {
			return err
		}
		done, err := c.prepareTogether(ctx, gpus)
		if err != nil {
			err = failed.retry(ctx, err)
		}
		if done || err != nil {
			return err
		}
	}
	return errors.New("the GPUs of the claim change all the time")
}

// prepareTogether carries out the task that all GPUs of a claim propose. It reports whether the claim is prepared.
func (c *Call) prepareTogether(ctx context.Context, gpus []string) (done bool, err error) {
	defer panics.Recover(ctx, &err)
	claim := c.Wanted.Claim.UID
	r, err := c.engine.runRoundFor(ctx, c.of, gpu.SortPCIAddresses(slices.Clone(gpus)), jointly(claim, gpus))
	switch {
	case err != nil:
		return false, err
	case r.task != nil:
		return r.err == nil, r.err // a call proposes nothing jointly but the commit
	}
	return !slices.ContainsFunc(gpus, func(address string) bool { return !r.decisions[address].isComplete(claim) }), nil
}

// prepareOn carries out the claim's tasks that concern one GPU alone: until it is prepared, or all of its GPUs have to agree.
func (c *Call) prepareOn(ctx context.Context, address string) (err error) {
	defer panics.Recover(ctx, &err)
	var failed attempts
	var waited *rules.Verdict
	claim, deadline := c.Wanted.Claim.UID, time.Now().Add(waitTime)
	for {
		if c.isOutOfDate() {
			return record.ErrOutOfDate
		}
		failed.begin()
		changed := c.engine.Store.Changed()
		r, err := c.engine.runRoundFor(ctx, c.of, []string{address}, c.ownTask(address))
		switch {
		case err != nil && waited != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
			return late(waited)
		case err != nil:
			return err
		}
		v, _ := r.decisions[address].Verdict(claim)
		switch own := r.task != nil && r.task.Claim == claim; {
		case v.State == rules.Waiting && (r.err == nil || !own):
			c.waitsFor(ctx, v, waited)
			if waited = &v; !mayBeFree(ctx, changed, deadline) {
				return late(waited)
			}
		case r.err != nil, v.State == rules.Refused, v.State == rules.Pending:
			err := cmp.Or(r.err, error(&v))
			if err := failed.retry(ctx, err); err != nil {
				return err
			}
		case r.task == nil, r.task.Aim == rules.Commit:
			return nil // it is prepared, or all of its GPUs have to agree
		}
	}
}

// ownTask chooses the claim's first task that concerns one GPU alone. If the claim waits, it is a task that makes room.
func (c *Call) ownTask(address string) choose {
	claim := c.Wanted.Claim.UID
	return func(decisions map[string]*Decision) *rules.Task {
		decision := decisions[address]
		if t := first(decision, address, func(t *rules.Task) bool { return t.Claim == claim }); t != nil {
			return t
		}
		if v, found := decision.Verdict(claim); !found || v.State != rules.Waiting {
			return nil
		}
		return first(decision, address, func(t *rules.Task) bool { return t.Aim < rules.Make })
	}
}

// waitsFor logs what the claim waits for, if that has changed.
func (c *Call) waitsFor(ctx context.Context, v rules.Verdict, was *rules.Verdict) {
	if was == nil || was.Why != v.Why {
		klog.FromContext(ctx).Info("Waiting", "reason", v.Why)
		if v.Other != "" {
			c.engine.Recheck(v.Other)
		}
	}
	if c.engine.SilentFor() > 0 {
		_, _ = c.engine.sessions(ctx) // that may be what is in its way
	}
}

// mayBeFree waits until something may have changed, and reports false if the time is over. Waiting helps: after a pod was deleted by
// force, its devices are allocated again before they are released.
func mayBeFree(ctx context.Context, changed <-chan struct{}, deadline time.Time) bool {
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	if time.Now().After(deadline) {
		return false
	}
	select {
	case <-ctx.Done():
	case <-changed:
	case <-time.After(poll):
	}
	return ctx.Err() == nil
}

// late is the error about what was waited for, when there is no time left.
func late(v *rules.Verdict) error {
	if errors.Is(v, rules.ErrTaken) {
		v.Why += ", and was not released in time"
	}
	return v
}
