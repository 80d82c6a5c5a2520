// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

var errTooSlow = errors.New("it was not ready in time")

func join(words []string) string { return strings.Join(words, ",") }

func (s *Supervisor) control(f folder) (control, error) {
	v, err := s.view(f)
	return control{view: v, limit: s.options.CommandLimit}, err
}

// start makes the session of sess.record ready. When it fails there is no process
// left; folder and mount may be.
func (s *Supervisor) start(ctx context.Context, sess *session) error {
	if err := s.startDaemon(ctx, sess); err != nil {
		return err
	}
	err := func() error {
		ctx, cancel := sess.daemon.while(ctx)
		defer cancel()
		if err := s.startServing(ctx, sess); err != nil {
			return fmt.Errorf("%w; %s", err, sess.tail())
		}
		return nil
	}()
	if err != nil {
		return errors.Join(err, s.end(context.WithoutCancel(ctx), sess))
	}
	return nil
}

// startDaemon starts a daemon in a clean place.
func (s *Supervisor) startDaemon(ctx context.Context, sess *session) error {
	v, err := s.view(sess.folder)
	if err != nil {
		return err
	}
	fresh, err := sess.make()
	if err != nil {
		return err
	}
	// From here on a supervisor that comes after this one finds all that follows.
	if err := sess.save(sess.record); err != nil {
		return err
	}
	if !fresh {
		if err := killMarked(ctx, sess.marker(), sess.record.Servers); err != nil {
			return err
		}
	}
	if err := errors.Join(sess.mount(), sess.clearPipe()); err != nil {
		return err
	}
	log, err := sess.openLog()
	if err != nil {
		return err
	}
	cmd := v.daemon(sess.record.Spec)
	cmd.Stdout, cmd.Stderr = log, log
	daemon, err := spawn(cmd)
	if err = errors.Join(err, log.Close()); err != nil {
		return fmt.Errorf("start the control daemon: %w", err)
	}
	sess.daemon = daemon
	sess.record.Daemon, sess.record.Servers = &daemon.processID, nil
	if err := sess.save(sess.record); err != nil {
		return errors.Join(err, s.end(context.WithoutCancel(ctx), sess))
	}
	return nil
}

// startServing waits for the daemon and starts the server.
func (s *Supervisor) startServing(ctx context.Context, sess *session) error {
	c, err := s.control(sess.folder)
	if err != nil {
		return err
	}
	if err := s.awaitDaemon(ctx, c); err != nil {
		return fmt.Errorf("the control daemon does not answer: %w", err)
	}
	return s.startServer(ctx, sess, c)
}

func (s *Supervisor) awaitDaemon(ctx context.Context, c control) error {
	var last error
	err := poll(ctx, func() (bool, error) {
		// Running the client only makes sense once there is a socket.
		if _, last = os.Stat(filepath.Join(c.folder.pipe(), "control")); last == nil {
			_, last = c.servers(ctx)
		}
		return last == nil, nil
	})
	if err != nil && last != nil {
		return fmt.Errorf("%w: %w", err, last)
	}
	return err
}

// startServer starts a server with the session's limits, waits until it takes
// clients, and reads the limits back. As root it serves any user's clients first:
// see the package's comment.
func (s *Supervisor) startServer(ctx context.Context, sess *session, c control) error {
	// A daemon that was adopted may never have had them, and others can change them.
	if err := c.setLimits(ctx, sess.record.Spec, 0); err != nil {
		return err
	}
	before := sess.position()
	patient := control{view: c.view, limit: s.options.StartLimit}
	answers, err := patient.run(ctx, "start_server -uid 0")
	if err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	// What was seen last: when there is no answer any more it says how far it came.
	var pids []int
	var last state
	err = poll(ctx, func() (bool, error) {
		now, err := c.servers(ctx)
		if err != nil {
			return false, err
		}
		if failed := sess.serverFailed(before); failed != "" {
			return false, errors.New(failed)
		}
		if len(now) == 0 {
			if len(pids) > 0 {
				return false, fmt.Errorf("it had PID %d and has ended", pids[0])
			}
			return false, nil
		}
		pids = now
		state, err := c.state(ctx, pids[0])
		if err != nil {
			return false, err
		}
		if last = state; last == stateFault {
			return false, errors.New("it is faulted although it has had no clients yet")
		}
		return last == stateActive, nil
	})
	if err != nil {
		if last != "" {
			err = fmt.Errorf("%w (its state is %s)", err, last)
		}
		return fmt.Errorf("the server does not start: %w%s", err, said(strings.Join(answers, "\n")))
	}
	// One that is not ready might leave these questions without an answer.
	servers, err := inspect(ctx, c, pids, sess.record.Spec)
	if err == nil && len(servers) == 0 {
		err = fmt.Errorf("it had PID %d and has ended", pids[0])
	}
	if err != nil {
		return fmt.Errorf("the server has started and cannot be used: %w", err)
	}
	return s.serve(ctx, sess, c, servers)
}

// serve takes these servers for the session's, if their limits are right or can be
// made so.
func (s *Supervisor) serve(ctx context.Context, sess *session, c control, servers []server) error {
	ids := make([]processID, 0, len(servers))
	for _, server := range servers {
		id, err := identify(server.pid)
		if err != nil {
			return fmt.Errorf("the server has ended: %w", err)
		}
		if !sess.owns(id) {
			return fmt.Errorf("the control daemon (%s) calls %s its server, which it did not start", sess.record.Daemon, id)
		}
		if err := server.limits.compare(sess.record.Spec); err != nil {
			klog.FromContext(ctx).Info("Setting the limits of an MPS server", "pid", id.PID, "reason", err)
			if err := c.setLimits(ctx, sess.record.Spec, id.PID); err != nil {
				return err
			}
		}
		ids = append(ids, id)
	}
	sess.record.Servers, sess.record.ServerUser = ids, sess.user(ids[0].PID)
	sess.record.Started, sess.record.Serving = true, true
	if err := sess.save(sess.record); err != nil {
		return err
	}
	s.watchServers(sess)
	sess.ready = time.Now()
	sess.show(Running, "")
	return nil
}

// owns tells whether the daemon has started a process. Servers are killed in the end,
// and whoever is root in a container can put a daemon of their own in the place of
// the right one, and have it name any process of the host.
func (s *session) owns(id processID) bool {
	st, err := readStat(id.PID)
	child := err == nil && s.record.Daemon != nil && st.parent == s.record.Daemon.PID
	return child || id.hasMarker(s.marker())
}

// watchServers has the session looked at when one of them ends. That it cannot be
// watched only means that its end is noticed later.
func (s *Supervisor) watchServers(sess *session) {
	watched := sess.watched
	sess.watched = nil
	for _, id := range sess.record.Servers {
		if slices.Contains(watched, id) {
			sess.watched = append(sess.watched, id)
			continue
		}
		server, err := adopt(id, s.closed)
		if server == nil || err != nil {
			continue
		}
		sess.watched = append(sess.watched, id)
		go func() {
			select {
			case <-server.done:
				notify(sess.serverEnded)
			case <-s.closed:
			}
		}()
	}
}

// end ends daemon and servers, and all else that they started. Each step has its
// own bound, and the next one is taken whatever became of it.
func (s *Supervisor) end(ctx context.Context, sess *session) error {
	if sess.daemon == nil && sess.record.Daemon != nil {
		var err error
		if sess.daemon, err = adopt(*sess.record.Daemon, s.closed); err != nil {
			return err
		}
	}
	if !sess.daemon.ended() {
		s.quit(ctx, sess)
	}
	limited, cancel := context.WithTimeoutCause(ctx, s.options.EndLimit, fmt.Errorf("waited for %s", s.options.EndLimit))
	defer cancel()
	if err := killMarked(limited, sess.marker(), sess.record.Servers); err != nil {
		return err
	}
	sess.daemon, sess.record.Daemon, sess.record.Servers = nil, nil, nil
	sess.silent = time.Time{}
	return nil
}

// quit lets the daemon end its servers and itself. Clients have a second: nobody
// ends a session that is in use, other than to start it anew.
func (s *Supervisor) quit(ctx context.Context, sess *session) {
	logger := klog.FromContext(ctx)
	c, err := s.control(sess.folder)
	if err == nil {
		asked, cancel := sess.daemon.while(ctx)
		defer cancel()
		if _, err = c.run(asked, "quit -t 1"); sess.daemon.ended() {
			return
		}
	}
	if err == nil && sess.daemon.wait(ctx, s.options.EndLimit) {
		return
	}
	logger.Info("MPS control daemon does not quit, ending it", "pid", sess.daemon.PID, "reason", err)
	if err := sess.daemon.signal(unix.SIGTERM); err != nil {
		logger.Error(err, "MPS control daemon gets no signal")
	}
	sess.daemon.wait(ctx, s.options.EndLimit/5)
}

// apply brings a session that runs to other limits, or back to the earlier ones.
func (s *Supervisor) apply(ctx context.Context, sess *session, c control, spec Spec) error {
	servers := append(pidsOf(sess.record.Servers), 0)
	if err := c.setLimits(ctx, spec, servers...); err != nil {
		if undone := c.setLimits(context.WithoutCancel(ctx), sess.record.Spec, servers...); undone != nil {
			err = errors.Join(err, fmt.Errorf("return to the earlier limits: %w", undone))
		}
		return err
	}
	changed := sess.record
	changed.Spec = spec
	if err := sess.save(changed); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("MPS limits changed", "percentage", spec.ThreadPercentage, "memory", spec.Memory,
		"earlierPercentage", sess.record.Spec.ThreadPercentage, "earlierMemory", sess.record.Spec.Memory, "servers", strconv.Itoa(len(changed.Servers)))
	sess.record = changed
	sess.show(sess.current().Phase, sess.current().Message)
	return nil
}

func pidsOf(processes []processID) []int {
	pids := make([]int, len(processes))
	for i, p := range processes {
		pids[i] = p.PID
	}
	return pids
}
