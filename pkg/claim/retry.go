// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
	"github.com/partage-dev/partage/pkg/steptime"
)

// retryPauses are the waits between attempts that fail for a reason that may
// pass. The kubelet gives a call 45 seconds and comes back only after a minute.
var retryPauses = []time.Duration{
	200 * time.Millisecond,
	500 * time.Millisecond,
	time.Second,
	2 * time.Second,
	4 * time.Second,
}

const (
	// retryTime bounds all attempts together: a new one does not begin later.
	retryTime = 20 * time.Second
	// roomTime bounds the wait for a place that another claim has.
	roomTime = 15 * time.Second
	// recordPoll is how often the record of the other claim is read, which
	// another process may change.
	recordPoll = 200 * time.Millisecond
)

// cleanError is a failure of an attempt that has left nothing, or that has found the
// claim prepared before.
type cleanError struct{ error }

func (e *cleanError) Unwrap() error { return e.error }

func clean(err error) error { return &cleanError{err} }

func cleanIf(is bool, err error) error {
	if !is {
		return err
	}
	return clean(err)
}

// transient reports whether another attempt may succeed. A GPU that somebody else has
// divided stays so. A supervisor that does not answer may be starting.
func transient(err error) bool {
	var nothingLeft *cleanError
	if !errors.As(err, &nothingLeft) || errors.Is(err, gpu.ErrHung) || errors.Is(err, partition.ErrDivided) {
		return false
	}
	return gpu.Transient(err) || errors.Is(err, sharing.ErrNoSupervisor)
}

// waitForRoom makes an attempt, and others as long as claims are in the way that may
// be about to go.
func (e *engine) waitForRoom(ctx context.Context, attempt func() error) error {
	err := attempt()
	var overlap *OverlapError
	if !errors.As(err, &overlap) {
		return err
	}
	e.doubtAll(overlap)
	limited, cancel := context.WithTimeout(ctx, roomTime)
	defer cancel()
	for errors.As(err, &overlap) {
		if waitErr := e.waitForClaim(limited, err, overlap); waitErr != nil {
			return clean(waitErr)
		}
		err = attempt()
	}
	return err
}

// waitForClaim waits until the claim that is in the way has changed: after a pod was
// deleted by force, its devices are allocated again before they are released. An
// abandoned claim is released here. The caller holds its own claim's lock and no GPU's.
func (e *engine) waitForClaim(ctx context.Context, cause error, overlap *OverlapError) error {
	if overlap.Abandoned() {
		return e.releaseAbandoned(ctx, cause, overlap)
	}
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	for {
		changed := e.store.Changed()
		if !e.inTheWay(overlap) {
			return nil
		}
		timer := time.NewTimer(recordPoll)
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w, and was not released in time", cause)
		}
		timer.Stop()
		if overlap.Shares > 0 {
			return nil // any other claim may have given a share back
		}
	}
}

// inTheWay reports whether the other claim still is.
func (e *engine) inTheWay(overlap *OverlapError) bool {
	r, err := e.store.Read(overlap.Other.UID)
	return err == nil && r != nil && r.State == overlap.OtherState && r.Has(overlap.OtherDevice)
}

// releaseAbandoned finishes what an abandoned claim left, or waits until the call that is
// just releasing it has done so. Two claims that release each other would wait for
// ever, so the time must be limited.
func (e *engine) releaseAbandoned(ctx context.Context, cause error, overlap *OverlapError) error {
	uid := overlap.Other.UID
	unlock, err := e.locks.Claim(ctx, uid)
	if err != nil {
		return errors.Join(cause, err)
	}
	defer unlock()
	r, err := e.load(ctx, uid)
	if err != nil {
		return errors.Join(cause, err)
	}
	if r == nil || r.State == journal.Prepared {
		return nil
	}
	klog.FromContext(ctx).Info("Cleaning up what another claim left", "other", r.Claim, "state", r.State)
	err = e.release(ctx, r)
	if left, readErr := e.store.Read(uid); err != nil && (readErr != nil || left != nil && left.Has(overlap.OtherDevice)) {
		return errors.Join(cause, err)
	}
	// What waits for another GPU is in nobody's way here.
	return nil
}
