// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/lock"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/sharing"
)

// errPending means that the rest of a release has to wait.
var errPending = errors.New("the rest is released later")

// lasting are the reasons for which a release ends later: there is nothing to talk to,
// the GPU does nothing, it may not be changed, or somebody else is not done. A pod that
// waits for the end of them would never end, and some would not end because it waits.
var lasting = []error{
	gpu.ErrDriverNotLoaded, gpu.ErrVersionMismatch, gpu.ErrLost, gpu.ErrNotFound, gpu.ErrHung, gpu.ErrResetRequired,
	gpu.ErrInUse, gpu.ErrNoPermission, sharing.ErrNoSupervisor, step.ErrNoProgram, step.ErrUnclear, lock.ErrBusy,
	context.DeadlineExceeded,
}

// maxFailing is how long a release may fail for any other reason before it is left to
// Reconcile as well.
const maxFailing = time.Minute

// failures remembers the releases of claims that have failed.
type failures struct {
	mu    sync.Mutex
	known map[types.UID]failure
}

type failure struct {
	since time.Duration
	last  error
}

// note returns for how long the release of a claim has failed.
func (f *failures) note(uid types.UID, err error, now time.Duration) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known == nil {
		f.known = map[types.UID]failure{}
	}
	one, known := f.known[uid]
	if !known {
		one.since = now
	}
	one.last = err
	f.known[uid] = one
	return now - one.since
}

// last returns why the release of a claim has failed, or nil.
func (f *failures) last(uid types.UID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.known[uid].last
}

func (f *failures) forget(uid types.UID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.known, uid)
}

// retain forgets all other claims.
func (f *failures) retain(uids []types.UID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	keepOnly(f.known, uids)
}

// pendingOr joins the errors of a release, and marks the result if it has to wait.
func (e *engine) pendingOr(claim Ref, errs []error) error {
	err := errors.Join(errs...)
	failing := e.failing.note(claim.UID, err, e.clock())
	if failing < maxFailing && slices.ContainsFunc(errs, func(err error) bool { return !isLasting(err) }) {
		return err
	}
	return fmt.Errorf("%w: %w", errPending, err)
}

func isLasting(err error) bool {
	return slices.ContainsFunc(lasting, func(reason error) bool { return errors.Is(err, reason) })
}
