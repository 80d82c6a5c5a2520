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

	"golang.org/x/sync/semaphore"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/util/logchange"
)

// session is an MPS session: what runs of it, and what is written down. Whatever happens, it does the same: it observes,
// decides by the rules, and acts, until nothing is due. Sessions never wait for each other.
type session struct {
	options Options
	folder  folder
	node    node
	pods    *endingPods
	// lock is for who works on the session.
	lock *semaphore.Weighted
	// wake has the monitor observe the session at once.
	wake chan struct{}

	// Guarded by the lock.
	record rules.Record
	pace   rules.Pace
	daemon daemon
	watch  watch
	// written is the record that is on the disk, as far as this supervisor knows.
	written rules.Record
	// running and writing are why it does not run, and cannot be written down.
	running, writing logchange.Problem

	mu sync.Mutex
	// interrupt ends what the monitor is doing.
	interrupt context.CancelFunc
	status    mps.Status
}

// notify sends to a channel that has room for one, unless it is full.
func notify(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// goal is the one that a session has which nobody asks for now: one that never ran, or is to be removed, has no other.
func (s *session) goal(otherwise rules.Goal) rules.Goal {
	if s.record.Removing || !s.record.Started {
		return rules.Removed
	}
	return otherwise
}

// monitor observes the session at intervals, and at once when something has ended, until ctx ends.
func (s *session) monitor(ctx context.Context) {
	timer := time.NewTimer(s.pods.next(time.Now(), s.options.CheckInterval))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-timer.C:
		}
		timer.Reset(s.pods.next(time.Now(), s.maintain(ctx)))
	}
}

// maintain does what is due for the session, and returns when to come back.
func (s *session) maintain(ctx context.Context) (again time.Duration) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.options.StartLimit, errTooSlow)
	defer cancel()
	s.mu.Lock()
	s.interrupt = cancel
	s.mu.Unlock()
	if s.lock.Acquire(ctx, 1) != nil {
		return s.options.CheckInterval
	}
	defer s.lock.Release(1)
	if s.record.Spec.ID == "" { // nobody has wanted it since it was removed
		return s.options.CheckInterval
	}
	again, err := s.run(ctx, s.goal(rules.Running), nil)
	if ctx.Err() == nil && !errors.Is(err, errDelayed) { // what is delayed was logged before
		s.running.Log(ctx, err, "MPS session does not run", "", "phase", s.current().Phase, "failures", s.pace.Failures)
	}
	return again
}

// ensure makes the session run as the spec says, or leaves nothing of one that never ran. The caller has its lock.
func (s *session) ensure(ctx context.Context, spec mps.Spec) (mps.Status, error) {
	limited, cancel := context.WithTimeoutCause(ctx, s.options.StartLimit, errTooSlow)
	defer cancel()
	if s.record.Removing {
		if _, err := s.run(limited, rules.Removed, nil); err != nil {
			return mps.Status{}, fmt.Errorf("an earlier session %s must be removed first: %w", spec.ID, err)
		}
	}
	isNew, began, before := !s.record.Started, time.Now(), s.record.Spec
	if isNew {
		s.record.Spec = spec
		s.publish(mps.Starting, "", nil)
	} else if err := s.record.Spec.CheckChange(spec); err != nil {
		return mps.Status{}, err
	}
	_, err := s.run(limited, rules.Running, &spec)
	status := s.current()
	switch {
	case err != nil && isNew:
		err = fmt.Errorf("start MPS session %s on %s: %w", spec.ID, strings.Join(spec.Devices, ", "), err)
		_, removeErr := s.run(context.WithoutCancel(ctx), rules.Removed, nil) // even if the caller is gone
		return mps.Status{}, errors.Join(err, removeErr)
	case err != nil:
		if !s.record.Serving { // what did run is tried again
			s.record.Spec = before
			err = errors.Join(err, s.write(s.record))
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
	errTooSlow = errors.New("it was not ready in time")
	// errDelayed: the next start is put off.
	errDelayed = errors.New("it has failed too often to be restarted at once")
)

const (
	// shortestPause is how soon it is observed again what is under way, at first.
	shortestPause = 2 * time.Millisecond
	longestPause  = 50 * time.Millisecond
	// maxRepeats is how often the same is done at once: who does something that changes nothing comes back later.
	maxRepeats = 3
)

// run observes, decides and acts until nothing is due, and returns when to come back. wanted is nil for the spec that it has. An error
// is why the session is not as it should be. The caller has the session's lock.
func (s *session) run(ctx context.Context, goal rules.Goal, wanted *mps.Spec) (again time.Duration, err error) {
	interval, awaited := shortestPause, ""
	for done := map[rules.Action]int{}; ; {
		o, err := s.observe(ctx, goal, wanted)
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
		case d.Action == rules.Rest && d.Wrong:
			return d.Again, errors.New(d.Message)
		case d.Action == rules.Rest:
			return d.Again, nil
		case d.Action == rules.Observe:
			pause(ctx, interval)
			interval = min(longestPause, interval*3/2)
			continue
		}
		if done[d.Action]++; done[d.Action] > maxRepeats {
			return s.options.CheckInterval, fmt.Errorf("the session does not come to rest: %s", d.Message)
		}
		if err := s.act(ctx, &d, o); err != nil {
			return s.failed(ctx, &d, err)
		}
		switch {
		case d.Action == rules.Remove, d.Action == rules.Suspend:
			return s.options.CheckInterval, nil
		case (d.Action == rules.Accept || d.Action == rules.SetLimits) && reflect.DeepEqual(s.record.Spec, o.Wanted):
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
	if d.Record.ClientKilled != s.record.ClientKilled && d.Record.ClientKilled != "" {
		logger.Info("A client of MPS was killed", "reason", d.Record.ClientKilled, "others", o.Harmed)
	}
	if d.Record.Kills > s.record.Kills {
		logger.Info("An MPS server may not work correctly any more; it is replaced as soon as it has no clients", "reason", d.Record.LastKill, "clients", o.Harmed)
	}
	if len(d.Record.Servers) < len(s.record.Servers) {
		s.watch.forget()
	}
	s.record, s.pace = d.Record, d.Pace
	if d.Action != rules.Remove || s.record.Started { // or the next supervisor would start it again
		s.writing.Log(ctx, s.write(s.record), "What has happened to an MPS session is not written down, will try again", "")
	}
	if d.Phase != "" || d.Message != "" {
		s.publish(d.Phase, d.Message, o.Clients)
	}
}

// write writes down a record, which is the session's from then on.
func (s *session) write(r rules.Record) error {
	if !reflect.DeepEqual(r, s.written) {
		if err := errors.Join(s.folder.make(), s.folder.save(r)); err != nil {
			return err
		}
	}
	s.record, s.written = r, r
	return nil
}

// failed handles an action that has failed, and returns when to come back, and the error for people.
func (s *session) failed(ctx context.Context, d *rules.Decision, err error) (again time.Duration, _ error) {
	again = s.options.CheckInterval
	isStart := d.Action == rules.StartServer || d.Action == rules.Accept && d.Pace.Asked
	switch {
	case ctx.Err() != nil && d.Action != rules.Remove: // it goes on later
	case isStart:
		err = errors.Join(fmt.Errorf("%w; %s", err, s.folder.logs().tail()), s.end(context.WithoutCancel(ctx)))
		fallthrough
	case d.Action == rules.Start, d.Action == rules.Stop:
		if !d.Failed {
			s.pace.Fail(time.Now(), s.options.times())
		}
		s.publish(s.pace.Phase(), err.Error(), nil)
		again = max(0, time.Until(s.pace.Next))
	case d.Action == rules.Accept, d.Action == rules.SetLimits, d.Action == rules.Remove:
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
		Spec: r.Spec, Phase: phase, Message: message, History: r.History, PipeDir: s.folder.clientPipe(),
	}
	if r.SharesMemory {
		s.status.ShmDir = s.folder.memory().shm()
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
	return s.status
}
