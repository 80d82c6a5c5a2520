// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"sync"

	"k8s.io/klog/v2"
)

// session is a session of the supervisor. Work on a session is done under its lock;
// sessions never wait for each other.
type session struct {
	id string
	// locked has room for one value, which the holder of the lock has put in.
	locked chan struct{}

	// Guarded by the lock.
	daemon *daemon
	repair *repairer
	// gone: removed, and no longer in the supervisor's list.
	gone bool
	// logged is the error that was logged last.
	logged string

	mu sync.Mutex
	// daemonEnded is closed when the daemon ends; nil without a daemon.
	daemonEnded <-chan struct{}
	// stopMonitor ends the monitor; nil without one.
	stopMonitor context.CancelFunc
	// changed tells the monitor that daemonEnded may be another channel.
	changed chan struct{}
}

// lock waits for the session's lock, or until ctx is done.
func (s *session) lock(ctx context.Context) error {
	select {
	case s.locked <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// unlock releases the lock and makes the monitor watch the present daemon.
func (s *session) unlock() {
	s.mu.Lock()
	s.daemonEnded = nil
	if s.daemon.process != nil {
		s.daemonEnded = s.daemon.process.Done()
	}
	s.mu.Unlock()
	<-s.locked
	notify(s.changed)
}

// notify sends to a channel that has room for one, unless it is full.
func notify(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// interrupt ends the monitor and what it is doing.
func (s *session) interrupt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopMonitor != nil {
		s.stopMonitor()
		s.stopMonitor = nil
	}
}

// logError logs an error, unless it is the one that was logged last: what fails is
// tried often.
func (s *session) logError(ctx context.Context, err error, message string) {
	if err.Error() != s.logged {
		s.logged = err.Error()
		klog.FromContext(ctx).Error(err, message, "phase", s.daemon.status.get().Phase, "failures", s.repair.backoff.failures)
	}
}
