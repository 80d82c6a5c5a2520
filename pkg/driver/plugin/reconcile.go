// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/panics"
)

// ClaimReconciler cleans up. Its method may be called concurrently with all others.
type ClaimReconciler interface {
	// Reconcile finishes or undoes what was left half done, and what belongs to
	// no claim any more. An error means that something is left; it is called
	// again in any case.
	Reconcile(ctx context.Context) error
	// ReleaseOrphans asks the API server about prepared claims until ctx ends, and
	// releases those that do not have their devices any more.
	ReleaseOrphans(ctx context.Context)
}

// reconciler cleans up at intervals, and after a claim failed that may have left something.
type reconciler struct {
	options *Options
	// failed is fired by a claim that failed, pollNow after it was cleaned up.
	failed, pollNow loop.Trigger

	problem logchange.Problem
	panics  panics.Repeated
}

// run cleans up until ctx ends. Claims that were deleted are looked for besides, since the
// API server may take its time.
func (r *reconciler) run(ctx context.Context) {
	var orphans sync.WaitGroup
	defer orphans.Wait()
	orphans.Go(func() { r.options.Claims.ReleaseOrphans(ctx) })
	ticker := time.NewTicker(r.options.ReconcileInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			r.runOnce(ctx)
		case <-r.failed:
			r.runOnce(ctx)
			r.pollNow.Fire()
		}
	}
}

// runOnce cleans up once. Two at a time do no harm.
func (r *reconciler) runOnce(ctx context.Context) {
	if err := r.reconcile(ctx); ctx.Err() == nil {
		if err != nil {
			r.options.Metrics.ReconcileFailed()
		}
		r.problem.Log(ctx, err, "Not everything is cleaned up, will try again", "Everything is cleaned up")
	}
}

func (r *reconciler) reconcile(ctx context.Context) (err error) {
	defer r.panics.Recover(ctx, &err)
	return r.options.Claims.Reconcile(ctx)
}
