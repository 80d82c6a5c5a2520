// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// reconcileForEver cleans up every now and then, and soon after a claim failed,
// until ctx ends.
func (p *Plugin) reconcileForEver(ctx context.Context) {
	ticker := time.NewTicker(p.ReconcileInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			p.reconcile(ctx)
		case <-p.failed:
			// The claims of a pod fail together.
			if !pause(ctx, p.followUp) {
				return
			}
			p.reconcile(ctx)
			signal(p.look)
		}
	}
}

// reconcile cleans up once. Two at a time do no harm.
func (p *Plugin) reconcile(ctx context.Context) {
	if err := p.Claims.Reconcile(ctx); ctx.Err() == nil {
		p.leftovers.tell(ctx, err)
	}
}

// reconcileFirst cleans up before claims are let through, because leftovers must
// be gone before the first claim needs their place. A GPU on which that takes
// long holds the others up no longer than cleanUpTimeout.
func (p *Plugin) reconcileFirst(ctx context.Context) {
	done := make(chan struct{})
	p.background.Go(func() {
		defer close(done)
		p.reconcile(ctx)
	})
	timer := time.NewTimer(cleanUpTimeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-ctx.Done():
	case <-timer.C:
		klog.FromContext(ctx).Info("Cleaning up takes long, going on", "waited", cleanUpTimeout)
	}
}

// leftovers remembers what was logged about cleaning up.
type leftovers struct {
	mu   sync.Mutex
	told string
}

// tell logs an error when it is another one than before, and when it is gone.
func (l *leftovers) tell(ctx context.Context, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if text == l.told {
		return
	}
	l.told = text
	if err != nil {
		klog.FromContext(ctx).Error(err, "Not everything is cleaned up, will try again")
		return
	}
	klog.FromContext(ctx).Info("Everything is cleaned up")
}

// pause returns false if ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// signal asks for something to be done, once however often it is called before
// that is begun.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
