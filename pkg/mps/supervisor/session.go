// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/process"
)

// session is an MPS session: what runs of it, and what is written down. Whatever happens, it does the same: it observes,
// decides by the rules, and acts, until nothing is due. Sessions never wait for each other.
type session struct {
	id      string
	options Options
	folder  folder
	node    node
	pods    *endingPods
	// locked has room for one value, which the holder of the session's lock has put in.
	locked chan struct{}
	// wake has the monitor observe the session at once.
	wake chan struct{}

	// Guarded by the lock.
	record rules.Record
	pace   rules.Pace
	daemon daemon
	watch  watch
	// unwritten: the record says something else. gone: removed, and no longer in the supervisor's list.
	unwritten, gone bool
	// logged is the error that was logged last.
	logged string

	mu sync.Mutex
	// interrupt ends what the monitor is doing.
	interrupt context.CancelFunc
	status    mps.Status
}

// wish is what somebody wants of a session.
type wish struct {
	goal rules.Goal
	// spec is nil for the one that it has.
	spec *mps.Spec
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

func (s *session) unlock() { <-s.locked }

// notify sends to a channel that has room for one, unless it is full.
func notify(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// monitor observes the session at intervals, and at once when something has ended, until ctx ends or the session is gone.
func (s *session) monitor(ctx context.Context) (gone bool) {
	timer := time.NewTimer(s.pods.next(time.Now(), s.options.CheckInterval))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-s.wake:
		case <-timer.C:
		}
		again, gone := s.maintain(ctx)
		if gone {
			return true
		}
		timer.Reset(s.pods.next(time.Now(), again))
	}
}

// maintain does what is due for the session, and returns when to come back.
func (s *session) maintain(ctx context.Context) (again time.Duration, gone bool) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.options.StartLimit, errTooSlow)
	defer cancel()
	s.mu.Lock()
	s.interrupt = cancel
	s.mu.Unlock()
	if s.lock(ctx) != nil {
		return s.options.CheckInterval, false
	}
	defer s.unlock()
	if s.gone {
		return 0, true
	}
	goal := rules.Running
	if s.record.Removing || !s.record.Started {
		goal = rules.Removed
	}
	again, err := s.run(ctx, wish{goal: goal})
	switch {
	case err == nil:
		s.logged = ""
	case errors.Is(err, errDelayed): // why was logged before
	// What fails is tried often.
	case ctx.Err() == nil && err.Error() != s.logged:
		s.logged = err.Error()
		klog.FromContext(ctx).Error(err, "MPS session does not run", "phase", s.current().Phase, "failures", s.pace.Failures)
	}
	return again, s.gone
}

// interruptMonitor ends what the monitor is doing, so that nobody waits for what is no longer wanted.
func (s *session) interruptMonitor() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.interrupt != nil {
		s.interrupt()
	}
}

// ensure makes the session run as the spec says, or leaves nothing of one that never ran. The caller has its lock.
func (s *session) ensure(ctx context.Context, spec mps.Spec) (mps.Status, error) {
	limited, cancel := context.WithTimeoutCause(ctx, s.options.StartLimit, errTooSlow)
	defer cancel()
	if s.record.Removing {
		if _, err := s.run(limited, wish{goal: rules.Removed}); err != nil {
			return mps.Status{}, fmt.Errorf("an earlier session %s must be removed first: %w", spec.ID, err)
		}
		return mps.Status{}, errRemoved
	}
	isNew, began, before := !s.record.Started, time.Now(), s.record.Spec
	if isNew {
		s.record.Spec = spec
		s.publish(mps.Starting, "", nil)
	} else if err := s.record.Spec.CheckChange(spec); err != nil {
		return mps.Status{}, err
	}
	_, err := s.run(limited, wish{spec: &spec})
	status := s.current()
	switch {
	case err != nil && isNew:
		err = fmt.Errorf("start MPS session %s on %s: %w", spec.ID, strings.Join(spec.Devices, ", "), err)
		_, removeErr := s.run(context.WithoutCancel(ctx), wish{goal: rules.Removed}) // even if the caller is gone
		return mps.Status{}, errors.Join(err, removeErr)
	case err != nil:
		if !s.record.Serving { // what did run is tried again
			s.record.Spec = before
			err = errors.Join(err, s.folder.save(s.record))
			s.publish("", err.Error(), nil)
		}
		return mps.Status{}, fmt.Errorf("session %s: %w", spec.ID, err)
	case status.Phase == mps.Faulted:
		return mps.Status{}, fmt.Errorf("%w: %s", mps.ErrFaulted, status.Message)
	case isNew:
		klog.FromContext(ctx).Info("MPS session started", "devices", spec.Devices, "percentage", spec.ThreadPercentage,
			"memory", spec.Memory, "multiUser", spec.MultiUser, "daemon", s.record.Daemon.PID, "took", time.Since(began).Round(time.Millisecond))
	}
	return status, nil
}

var (
	// errRemoved: the session that was being removed is gone, and there can be another.
	errRemoved = errors.New("removed")
	errTooSlow = errors.New("it was not ready in time")
	// errDelayed: the next start is put off.
	errDelayed = errors.New("it has failed too often to be restarted at once")
)

const (
	// shortestLook is how soon it is observed again what is under way, at first.
	shortestLook = 2 * time.Millisecond
	longestLook  = 50 * time.Millisecond
	// maxRepeats is how often the same is done at once: who does something that changes nothing comes back later.
	maxRepeats = 3
)

// run observes, decides and acts until nothing is due, and returns when to come back. An error is why the session is not as
// it should be. The caller has the session's lock.
func (s *session) run(ctx context.Context, w wish) (again time.Duration, err error) {
	look, awaited := shortestLook, ""
	for done := map[rules.Do]int{}; ; {
		o, err := s.observe(ctx, w)
		if err = explain(ctx, err, awaited, s.folder.logs()); err != nil {
			return s.options.CheckInterval, err
		}
		if done[rules.Terminate] > 0 {
			o.Doomed = nil // once is enough
		}
		d := rules.Decide(o.Observation)
		s.note(ctx, &d, o)
		awaited = d.Message
		switch {
		case d.Delayed:
			return d.Again, errDelayed
		case d.Do == rules.Rest && d.Wrong:
			return d.Again, errors.New(d.Message)
		case d.Do == rules.Rest:
			return d.Again, nil
		case d.Do == rules.Look:
			pause(ctx, look)
			look = min(longestLook, look*3/2)
			continue
		}
		if done[d.Do]++; done[d.Do] > maxRepeats {
			return s.options.CheckInterval, fmt.Errorf("the session does not come to rest: %s", d.Message)
		}
		if err := s.act(ctx, &d, o); err != nil {
			return s.failed(ctx, &d, err)
		}
		switch {
		case s.gone, d.Do == rules.Suspend:
			return 0, nil
		case (d.Do == rules.Accept || d.Do == rules.SetLimits) && reflect.DeepEqual(s.record.Spec, o.Wanted):
			s.publish(mps.Running, "", o.Clients)
			return s.options.CheckInterval, nil // the limits were read back
		}
	}
}

// explain returns why nothing can be decided, and what was waited for.
func explain(ctx context.Context, err error, awaited string, l logs) error {
	if awaited == "" {
		return err
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w; %s", awaited, err, l.tail())
	}
	return err
}

// pause waits until ctx is done, and not shorter, as wait.For does before a deadline: then its cause would not be told.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// note writes down, and says, what follows from an observation.
func (s *session) note(ctx context.Context, d *rules.Decision, o *observation) {
	logger := klog.FromContext(ctx)
	if d.Record.Losses > s.record.Losses {
		logger.Info("MPS clients lost their server", "reason", d.Record.LastLoss, "losses", d.Record.Losses)
	}
	if d.Record.Doubt != s.record.Doubt && d.Record.Doubt != "" {
		logger.Info("A client of MPS was killed", "reason", d.Record.Doubt, "others", o.Harmed)
	}
	if d.Record.Kills > s.record.Kills {
		logger.Info("An MPS server may not work correctly any more; it is replaced as soon as it has no clients", "reason", d.Record.LastKill, "clients", o.Harmed)
	}
	if len(d.Record.Servers) < len(s.record.Servers) {
		s.watch.forget()
	}
	changed := !reflect.DeepEqual(d.Record, s.record)
	s.record, s.pace = d.Record, d.Pace
	if changed && d.Do != rules.Remove {
		err := s.folder.save(s.record)
		if s.unwritten = err != nil; s.unwritten {
			logger.Error(err, "What has happened to an MPS session is not written down", "what", d.Message)
		}
	}
	if d.Phase != "" || d.Message != "" {
		s.publish(d.Phase, d.Message, o.Clients)
	}
}

// failed handles an action that has failed, and returns when to come back, and the error for people.
func (s *session) failed(ctx context.Context, d *rules.Decision, err error) (again time.Duration, _ error) {
	again = s.options.CheckInterval
	isStart := d.Do == rules.StartServer || d.Do == rules.Accept && d.Pace.Asked
	switch {
	case ctx.Err() != nil && d.Do != rules.Remove: // it goes on later
	case isStart:
		err = errors.Join(fmt.Errorf("%w; %s", err, s.folder.logs().tail()), s.end(context.WithoutCancel(ctx)))
		fallthrough
	case d.Do == rules.Start, d.Do == rules.Stop:
		if !d.Failed {
			s.pace.Fail(time.Now(), s.options.times())
		}
		s.publish(s.pace.Phase(), err.Error(), nil)
		again = max(0, time.Until(s.pace.Next))
	case d.Do == rules.Accept, d.Do == rules.SetLimits, d.Do == rules.Remove:
		s.publish(mps.Failed, err.Error(), nil)
	}
	return again, err
}

// publish sets the session's status. The phase stays if it is empty, and so do the clients if they are nil.
func (s *session) publish(phase mps.Phase, message string, clients []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &s.record
	if phase == "" {
		phase = s.status.Phase
	}
	if clients == nil {
		clients = s.status.Clients
	}
	if phase == mps.Running && message == "" {
		message = s.node.warning
	}
	s.status = mps.Status{
		Spec: r.Spec.Clone(), Phase: phase, Message: message,
		Losses: r.Losses, LastLoss: r.LastLoss, LastLossTime: r.LastLossTime, Kills: r.Kills, LastKill: r.LastKill,
		PipeDir: s.folder.clientPipe(),
	}
	if r.SharesMemory {
		s.status.ShmDir = s.folder.shm()
	}
	if len(r.Servers) > 0 {
		s.status.Servers = process.PIDs(r.Servers)
		if len(clients) > 0 {
			s.status.Clients = clients
		}
	}
}

// current returns the status that was published last, to anybody.
func (s *session) current() mps.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.status
	status.Spec = status.Spec.Clone()
	return status
}
