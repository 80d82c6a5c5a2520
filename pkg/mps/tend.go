// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
)

const (
	// A session that fails this often in a row is called failed.
	failuresToFail = 3
	// After this many intervals without an answer a session is called failed…
	silentToFail = 3
	// …and after this many its daemon is ended, if no client would notice.
	silentToEnd = 15
)

// tend brings a session that ran before to work as spec says: it starts what ended,
// and checks what runs. Without an error the session is running, or faulted.
func (s *Supervisor) tend(ctx context.Context, sess *session, spec Spec) error {
	if err := s.takeOver(ctx, sess); err != nil {
		return err
	}
	if !sess.daemon.ended() {
		err := poll(ctx, func() (bool, error) {
			err := s.check(ctx, sess)
			return sess.current().Phase != Starting, err
		})
		if endedMeanwhile := sess.daemon.ended() && sess.record.Daemon != nil; !endedMeanwhile {
			return s.tended(ctx, sess, spec, err)
		}
	}
	s.noteEnd(ctx, sess)
	if sess.pause() > 0 {
		return errPause
	}
	return s.restart(ctx, sess, spec)
}

// tended is what follows a check.
func (s *Supervisor) tended(ctx context.Context, sess *session, spec Spec, err error) error {
	if errors.Is(err, errTooSlow) && sess.current().Phase == Starting {
		// A server that never gets ready has no clients.
		err = errors.Join(err, s.end(context.WithoutCancel(ctx), sess))
		s.lose(ctx, sess, "the control daemon did not notice that its server had ended")
		s.showFailure(sess, err)
	}
	if err != nil || sess.current().Phase != Running || sess.record.Spec.sameLimits(spec) {
		return err
	}
	c, err := s.control(sess.folder)
	if err != nil {
		return err
	}
	return s.apply(ctx, sess, c, spec)
}

// takeOver watches the daemon that an earlier supervisor started.
func (s *Supervisor) takeOver(ctx context.Context, sess *session) error {
	if sess.daemon != nil || sess.record.Daemon == nil {
		return nil
	}
	var err error
	if sess.daemon, err = adopt(*sess.record.Daemon, s.closed); err != nil {
		return err
	}
	if sess.daemon != nil {
		klog.FromContext(ctx).Info("MPS control daemon adopted", "pid", sess.daemon.PID)
		s.watchServers(sess)
	}
	return nil
}

// noteEnd counts what the end of a daemon meant, once.
func (s *Supervisor) noteEnd(ctx context.Context, sess *session) {
	if sess.record.Daemon == nil {
		return
	}
	text := fmt.Sprintf("the control daemon (%s) ended: %s", sess.record.Daemon, "it ended together with the supervisor, or while there was none")
	if sess.daemon != nil {
		text = fmt.Sprintf("the control daemon (%s) ended: %s", sess.record.Daemon, sess.daemon.how)
	}
	s.lose(ctx, sess, text)
	sess.daemon, sess.record.Daemon = nil, nil
	sess.broke(s.options)
	if err := sess.save(sess.record); err != nil {
		klog.FromContext(ctx).Error(err, "MPS loss is not written down")
	}
	sess.show(Starting, text)
}

// lose counts a loss, if clients could lose anything.
func (s *Supervisor) lose(ctx context.Context, sess *session, text string) {
	if sess.record.lose(text, time.Now().UTC().Truncate(time.Second)) {
		klog.FromContext(ctx).Info("MPS clients lost their server", "reason", text, "losses", sess.record.Losses)
	}
}

// broke counts the end of what ran as a failure, and as the first one if it ran for
// long.
func (s *session) broke(o Options) {
	if time.Since(s.ready) > o.LongestPause {
		s.failures = 0
	}
	s.failed(o)
}

// errPause: it is too early for the next attempt.
var errPause = errors.New("it has failed too often to be started again at once")

// pause is how long the next attempt is put off. Who asks does not wait.
func (s *session) pause() time.Duration {
	if s.asked {
		return 0
	}
	return max(0, time.Until(s.nextTry))
}

// failed puts the next attempt off: not after the first failure in a row, then
// longer and longer.
func (s *session) failed(o Options) {
	s.failures++
	pause := time.Duration(0)
	if s.failures > 1 {
		// A shift by a few is enough to reach any sensible longest pause.
		pause = min(o.LongestPause, o.FirstPause<<min(s.failures-2, 16))
	}
	s.nextTry = time.Now().Add(pause)
}

// restart starts daemon and server of a session that ran before. A session that
// cannot be started stays the one that it was.
func (s *Supervisor) restart(ctx context.Context, sess *session, spec Spec) error {
	earlier := sess.record.Spec
	sess.record.Spec = spec
	err := s.start(ctx, sess)
	if err == nil {
		klog.FromContext(ctx).Info("MPS session runs again", "daemon", sess.daemon.PID, "losses", sess.record.Losses)
		return nil
	}
	sess.record.Spec = earlier
	if saveErr := sess.save(sess.record); saveErr != nil {
		err = errors.Join(err, saveErr)
	}
	s.showFailure(sess, err)
	return err
}

func (s *Supervisor) showFailure(sess *session, err error) {
	sess.failed(s.options)
	phase := Starting
	if sess.failures >= failuresToFail {
		phase = Failed
	}
	sess.show(phase, err.Error())
}

// check compares what runs with what is wanted, and repairs what it can. An error
// means that the session does not run.
func (s *Supervisor) check(ctx context.Context, sess *session) error {
	unmounted, err := sess.unmounted()
	if err != nil {
		return err
	}
	if len(unmounted) > 0 {
		return s.replaceDaemon(ctx, sess, fmt.Errorf("somebody unmounted %s of the MPS session", join(unmounted)))
	}
	c, err := s.control(sess.folder)
	if err != nil {
		return s.silence(ctx, sess, err)
	}
	asked, cancel := sess.daemon.while(ctx)
	defer cancel()
	servers, err := inspect(asked, c, pidsOf(sess.record.Servers), sess.record.Spec)
	if err != nil {
		return s.silence(ctx, sess, err)
	}
	sess.silent = time.Time{}
	if i := slices.IndexFunc(servers, func(one server) bool { return !anyAlive([]int{one.pid}) }); i >= 0 {
		// The daemon has not noticed, and may have another one soon.
		sess.show(Starting, fmt.Sprintf("the server with PID %d has ended", servers[i].pid))
		return nil
	}
	s.noteServers(ctx, sess, servers)
	if len(servers) == 0 {
		sess.show(Starting, "there is no server")
		if sess.pause() > 0 {
			return errPause
		}
		if err := s.startServer(asked, sess, c); err != nil {
			err = errors.Join(fmt.Errorf("%w; %s", err, sess.tail()), s.end(context.WithoutCancel(ctx), sess))
			s.showFailure(sess, err)
			return err
		}
		return nil
	}
	return s.judge(asked, sess, c, servers)
}

// judge decides what the session is doing from what its servers are.
func (s *Supervisor) judge(ctx context.Context, sess *session, c control, servers []server) error {
	pids := serverPIDs(servers)
	var clients []int
	active := false
	for _, server := range servers {
		clients = append(clients, server.clients...)
		active = active || server.state == stateActive
		if server.state != stateFault {
			continue
		}
		text := fmt.Sprintf("a fatal fault of a client ended all clients of the server with PID %d", server.pid)
		if sess.record.Serving {
			s.lose(ctx, sess, text)
			if err := sess.save(sess.record); err != nil {
				return err
			}
		}
		sess.showClients(Faulted, text+"; there will be no new ones before those that are connected have ended", clients)
		return nil
	}
	if !active {
		if sess.record.Serving && slices.Equal(pids, pidsOf(sess.record.Servers)) {
			// It served already, so it is on its way out of a fault that nobody saw.
			s.lose(ctx, sess, fmt.Sprintf("a fatal fault of a client seems to have ended all clients of the server with PID %d, which is %s again",
				servers[0].pid, servers[0].state))
			if err := sess.save(sess.record); err != nil {
				return err
			}
		}
		sess.showClients(Starting, fmt.Sprintf("the server with PID %d is %s", servers[0].pid, servers[0].state), clients)
		return nil
	}
	if !sess.record.Serving || !slices.Equal(pids, pidsOf(sess.record.Servers)) {
		if err := s.serve(ctx, sess, c, servers); err != nil {
			sess.show(Failed, err.Error())
			return err
		}
		sess.showClients(Running, "", clients)
		return nil
	}
	for _, server := range servers {
		if err := s.hold(ctx, sess, c, server); err != nil {
			sess.show(Failed, err.Error())
			return err
		}
	}
	sess.showClients(Running, "", clients)
	return nil
}

// hold makes a server have the session's limits: others can change them.
func (s *Supervisor) hold(ctx context.Context, sess *session, c control, server server) error {
	if server.state != stateActive {
		return nil
	}
	err := server.limits.compare(sess.record.Spec)
	if err == nil {
		return nil
	}
	klog.FromContext(ctx).Info("Somebody changed the limits of an MPS server, changing them back", "pid", server.pid, "reason", err)
	return c.setLimits(ctx, sess.record.Spec, server.pid)
}

// noteServers counts what the end of servers meant, once.
func (s *Supervisor) noteServers(ctx context.Context, sess *session, servers []server) {
	var ended []string
	wanted := true
	left := slices.DeleteFunc(slices.Clone(sess.record.Servers), func(known processID) bool {
		there := slices.ContainsFunc(servers, func(one server) bool { return one.pid == known.PID })
		if now, err := identify(known.PID); err == nil && now != known {
			there = false // the PID is another server's
		}
		if !there {
			ended = append(ended, known.String())
			wanted = wanted && sess.endedInOrder(known.PID)
			known.collect()
		}
		return !there
	})
	if len(ended) == 0 {
		return
	}
	if wanted && len(servers) > 0 && sess.forAnotherUser(servers[0].pid) {
		klog.FromContext(ctx).Info("MPS replaced a server by one for another user", "ended", strings.Join(ended, ", "), "pid", servers[0].pid)
	} else {
		s.lose(ctx, sess, fmt.Sprintf("the server (%s) ended", strings.Join(ended, ", ")))
		sess.broke(s.options)
	}
	sess.record.Servers = left
	if err := sess.save(sess.record); err != nil {
		klog.FromContext(ctx).Error(err, "MPS loss is not written down")
	}
}

// forAnotherUser tells whether a server was started in place of the last one because
// of its user, which MPS does only when that had no clients any more.
func (s *session) forAnotherUser(server int) bool {
	before, now := s.record.ServerUser, s.user(server)
	return !s.record.Spec.MultiUser && before != "" && now != "" && before != now
}

// silence is what follows when the daemon does not answer. Its servers may do well
// without it, so that its end must not be the end of clients.
func (s *Supervisor) silence(ctx context.Context, sess *session, cause error) error {
	if sess.daemon.ended() {
		return cause // and the keeper is on its way
	}
	if ctx.Err() != nil {
		return cause // it had no time to answer
	}
	if sess.silent.IsZero() {
		sess.silent = time.Now()
	}
	status := sess.current()
	cause = fmt.Errorf("the control daemon (%s) does not answer: %w", sess.daemon.processID, cause)
	switch since := time.Since(sess.silent); {
	case since >= silentToEnd*s.options.CheckInterval && !anyAlive(status.Clients):
		return s.replaceDaemon(ctx, sess, cause)
	case since >= silentToFail*s.options.CheckInterval:
		sess.show(Failed, cause.Error())
	default:
		sess.show(status.Phase, cause.Error())
	}
	return cause
}

// replaceDaemon ends a daemon that is of no use any more, and starts another.
func (s *Supervisor) replaceDaemon(ctx context.Context, sess *session, cause error) error {
	klog.FromContext(ctx).Error(cause, "Replacing the MPS control daemon", "pid", sess.daemon.PID)
	if err := s.end(ctx, sess); err != nil {
		s.showFailure(sess, err)
		return errors.Join(cause, err)
	}
	s.lose(ctx, sess, cause.Error())
	sess.broke(s.options)
	return s.restart(ctx, sess, sess.record.Spec)
}

// anyAlive tells whether there is such a process. 0 is one that cannot be seen.
func anyAlive(pids []int) bool {
	return slices.ContainsFunc(pids, func(pid int) bool {
		id, err := identify(pid)
		return err == nil && id.alive()
	})
}
