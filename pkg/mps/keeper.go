// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// session is one of the supervisor's. Who works on it has its turn; sessions never
// wait for each other.
type session struct {
	folder

	id string
	// turn has room for one: who put something in has the turn.
	turn chan struct{}

	// For who has the turn.
	record record
	// gone: removed, and no longer in the supervisor's list.
	gone bool
	// daemon is the one of record, as long as it is not known to have ended.
	daemon *process
	// failures in a row, and when the next attempt is due, unless somebody asks.
	failures int
	nextTry  time.Time
	asked    bool
	// ready is when the session became ready the last time.
	ready time.Time
	// complained is the error that was logged last.
	complained string
	// silent is since when the daemon has not answered.
	silent time.Time
	// watched are the servers whose end will be noticed at once.
	watched []processID

	// For everybody.
	mu     sync.Mutex
	status Status
	// ended is closed when the daemon ends; nil without a daemon.
	ended <-chan struct{}
	// stopKeeper ends the keeper; nil without one.
	stopKeeper context.CancelFunc
	// poke tells the keeper that there may be another daemon, serverEnded that it
	// should look at once.
	poke, serverEnded chan struct{}
}

func (s *Supervisor) newSession(id string) *session {
	return &session{
		folder: s.folder(id), id: id, turn: make(chan struct{}, 1), poke: make(chan struct{}, 1), serverEnded: make(chan struct{}, 1),
	}
}

func (s *session) acquire(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// release gives the turn back and lets the keeper see what is new.
func (s *session) release() {
	s.mu.Lock()
	s.ended = nil
	if s.daemon != nil {
		s.ended = s.daemon.done
	}
	s.mu.Unlock()
	<-s.turn
	notify(s.poke)
}

// notify leaves word in a channel that has room for one.
func notify(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// show publishes what the session is doing. The caller has the turn.
func (s *session) show(phase Phase, message string) {
	s.mu.Lock()
	clients := s.status.Clients
	s.mu.Unlock()
	s.showClients(phase, message, clients)
}

func (s *session) showClients(phase Phase, message string, clients []int) {
	status := Status{
		Spec: s.record.Spec.clone(), Phase: phase, Message: message,
		Losses: s.record.Losses, LastLoss: s.record.LastLoss, LastLossTime: s.record.LastLossTime,
		PipeDir: s.pipe(), ShmDir: s.shm(),
	}
	for _, server := range s.record.Servers {
		status.Servers = append(status.Servers, server.PID)
	}
	if len(status.Servers) > 0 {
		status.Clients = slices.Clone(clients)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = status
}

// current is what was published last.
func (s *session) current() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.status
	status.Spec = status.Spec.clone()
	status.Servers, status.Clients = slices.Clone(status.Servers), slices.Clone(status.Clients)
	return status
}

// keep starts the session's keeper, unless it has one. It looks the first time after
// the pause, and outlives ctx, from which it has its logger.
func (s *Supervisor) keep(ctx context.Context, sess *session, pause time.Duration) {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	if sess.stopKeeper != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	sess.stopKeeper = cancel
	go func() {
		select {
		case <-s.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	s.wg.Go(func() {
		defer cancel()
		s.keeper(ctx, sess, pause)
	})
}

// interrupt ends what the keeper is doing, and the keeper.
func (s *session) interrupt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopKeeper != nil {
		s.stopKeeper()
		s.stopKeeper = nil
	}
}

// keeper looks after a session: at intervals, and at once when its daemon or a server
// ends.
func (s *Supervisor) keeper(ctx context.Context, sess *session, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		sess.mu.Lock()
		ended := sess.ended
		sess.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-sess.poke:
			continue // there may be another daemon
		case <-ended:
		case <-sess.serverEnded:
		case <-timer.C:
		}
		if sess.acquire(ctx) != nil {
			return
		}
		if sess.gone {
			sess.release()
			return
		}
		pause = 0
		if ctx.Err() == nil {
			pause = s.look(ctx, sess)
		}
		sess.release()
		timer.Reset(pause)
	}
}

// look does what is due for a session and returns when to come back.
func (s *Supervisor) look(ctx context.Context, sess *session) time.Duration {
	if sess.record.Removing {
		if err := s.remove(ctx, sess); err != nil {
			sess.complain(ctx, err, "MPS session cannot be removed")
			return s.options.CheckInterval
		}
		s.forget(sess)
		return 0
	}
	if !sess.record.Started {
		// Whoever wanted it has given up before it was begun.
		s.forget(sess)
		return 0
	}
	if err := s.takeOver(ctx, sess); err != nil {
		sess.complain(ctx, err, "MPS control daemon cannot be adopted")
		return s.options.CheckInterval
	}
	if sess.daemon.ended() {
		s.noteEnd(ctx, sess)
		if wait := sess.pause(); wait > 0 {
			return wait
		}
	}
	limited, cancel := context.WithTimeoutCause(ctx, s.options.StartLimit, errTooSlow)
	defer cancel()
	if err := s.tend(limited, sess, sess.record.Spec); err != nil {
		if ctx.Err() != nil {
			return 0
		}
		if errors.Is(err, errPause) {
			return sess.pause()
		}
		sess.complain(ctx, err, "MPS session does not run")
		if sess.daemon.ended() {
			return sess.pause()
		}
		return s.options.CheckInterval
	}
	sess.complained = ""
	if err := sess.boundLogs(); err != nil {
		klog.FromContext(ctx).Error(err, "MPS logs grow")
	}
	return s.options.CheckInterval
}

// complain logs an error, unless it is the one that was logged before: what fails is
// tried often.
func (s *session) complain(ctx context.Context, err error, message string) {
	if err.Error() != s.complained {
		s.complained = err.Error()
		klog.FromContext(ctx).Error(err, message, "phase", s.current().Phase, "failures", s.failures)
	}
}
