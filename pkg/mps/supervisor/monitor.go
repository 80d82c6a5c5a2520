// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"time"
)

// startMonitor starts the session's monitor, unless it has one. The first check is
// after the delay. The monitor outlives ctx, which has its logger.
func (s *Supervisor) startMonitor(ctx context.Context, sess *session, delay time.Duration) {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	if sess.stopMonitor != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	sess.stopMonitor = cancel
	go func() {
		select {
		case <-s.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	s.wg.Go(func() {
		defer cancel()
		s.monitor(ctx, sess, delay)
	})
}

// monitor reconciles a session at intervals, and at once when its daemon or a server
// ends, or a client is killed.
func (s *Supervisor) monitor(ctx context.Context, sess *session, delay time.Duration) {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	for {
		sess.mu.Lock()
		daemonEnded := sess.daemonEnded
		sess.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-sess.changed:
			continue
		case <-daemonEnded:
		case <-sess.daemon.serverEnded:
		case <-sess.daemon.clientKilled:
		case <-timer.C:
		}
		if sess.lock(ctx) != nil {
			return
		}
		if sess.gone {
			sess.unlock()
			return
		}
		delay = 0
		if ctx.Err() == nil {
			delay = s.reconcile(ctx, sess)
		}
		sess.unlock()
		timer.Reset(delay)
	}
}

// reconcile does what is due for a session and returns when to come back.
func (s *Supervisor) reconcile(ctx context.Context, sess *session) time.Duration {
	d, r := sess.daemon, sess.repair
	if d.record.Removing {
		if err := d.remove(ctx); err != nil {
			sess.logError(ctx, err, "MPS session cannot be removed")
			return s.options.CheckInterval
		}
		s.forget(sess)
		return 0
	}
	if !d.record.Started {
		// Its Ensure was canceled before it began.
		s.forget(sess)
		return 0
	}
	if err := d.adopt(ctx); err != nil {
		sess.logError(ctx, err, "MPS control daemon cannot be adopted")
		return s.options.CheckInterval
	}
	if d.process.Ended() {
		r.recordDaemonEnd(ctx)
		if delay := r.backoff.delay(); delay > 0 {
			return delay
		}
	}
	limited, cancel := context.WithTimeoutCause(ctx, s.options.StartLimit, errTooSlow)
	defer cancel()
	if err := r.repair(limited, d.record.Spec); err != nil {
		if ctx.Err() != nil {
			return 0
		}
		if errors.Is(err, errDelayed) {
			return r.backoff.delay()
		}
		sess.logError(ctx, err, "MPS session does not run")
		if d.process.Ended() {
			return r.backoff.delay()
		}
		return s.options.CheckInterval
	}
	sess.logged = ""
	return s.options.CheckInterval
}
