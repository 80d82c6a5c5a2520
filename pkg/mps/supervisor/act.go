// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
)

// act does one thing. What it has done is observed afterwards.
func (s *session) act(ctx context.Context, d *rules.Decision, o *observation) error {
	switch d.Action {
	case rules.Remove:
		return s.remove(ctx)
	case rules.Suspend:
		return s.suspend(ctx)
	case rules.Start:
		return s.start(ctx)
	case rules.Stop:
		return s.stop(ctx, d)
	case rules.Rest, rules.Observe, rules.Save:
		return nil // nothing is left to do
	}
	client, err := s.daemon.client(&s.record)
	if err != nil {
		return err
	}
	alive, cancel := s.daemon.keeper.Context(ctx, "the control daemon")
	defer cancel()
	c := commands{Client: client, options: s.options}
	switch d.Action { //nolint:exhaustive // the others need no daemon that answers
	case rules.StartServer:
		if err = s.write(s.record); err == nil { // the next supervisor must know the daemon that containers have
			err = c.startServer(alive, s.folder, s.record.Spec)
		}
		s.pace.Parent = time.Now()
		return err
	case rules.Accept:
		return s.accept(alive, c, o.Servers)
	case rules.SetLimits:
		return c.setLimits(alive, s.record.Spec, o.Servers)
	case rules.ChangeLimits:
		return s.changeLimits(alive, c, o.Wanted)
	case rules.Terminate:
		c.terminate(alive, o.Doomed, &s.watch)
		return nil
	case rules.ReplaceServers:
		if err := c.shutDown(ctx, s.record.Servers); err != nil {
			klog.FromContext(ctx).Error(err, "MPS servers do not end: their daemon is ended, too")
			return s.end(ctx)
		}
		return nil
	}
	return fmt.Errorf("nothing is known of action %d", d.Action)
}

// start starts a daemon, after what is left of an earlier one has ended.
func (s *session) start(ctx context.Context) error {
	program, err := newControlProgram(s.options.Roots, s.folder)
	if err == nil {
		err = checkNodes(ctx, s.options.Roots)
	}
	if err != nil {
		return err
	}
	// From here on the next supervisor finds everything that follows.
	if err := errors.Join(s.write(s.record), s.end(ctx)); err != nil {
		return err
	}
	if err := s.folder.mount(shmSize(s.record.Spec, s.node.tmpfs, s.node.proc), s.node.label); err != nil {
		return err
	}
	if err := s.folder.clearPipe(ctx); err != nil {
		return err
	}
	log, err := s.folder.logs().open()
	if err != nil {
		return err
	}
	cmd := program.daemon(s.record.Spec)
	cmd.Stdout, cmd.Stderr = log, log
	if err := errors.Join(s.daemon.start(cmd), log.Close()); err != nil {
		return fmt.Errorf("start the control daemon: %w", err)
	}
	return nil
}

// stop ends a daemon that is of no more use, or whose start has failed. Another is started later.
func (s *session) stop(ctx context.Context, d *rules.Decision) error {
	if d.Failed {
		err := fmt.Errorf("%s; %s", d.Message, s.folder.logs().tail())
		return errors.Join(err, s.end(context.WithoutCancel(ctx)))
	}
	klog.FromContext(ctx).Info("Replacing the MPS control daemon", "keeper", s.daemon.keeper.PID, "reason", d.Message)
	if err := s.end(ctx); err != nil {
		return fmt.Errorf("%s: %w", d.Message, err)
	}
	return nil
}

// end ends the daemon, its servers, and everything else that they have started.
func (s *session) end(ctx context.Context) error {
	if err := s.daemon.adopt(ctx); err != nil {
		return err
	}
	if err := s.daemon.end(ctx, &s.record); err != nil {
		return err
	}
	s.watch.forget()
	s.record.Daemon, s.record.Servers, s.record.Sockets = nil, nil, nil
	return nil
}

// suspend leaves what the next supervisor needs to start the session again.
func (s *session) suspend(ctx context.Context) error {
	if err := s.end(ctx); err != nil {
		return fmt.Errorf("session %s: %w", s.folder.id(), err)
	}
	return errors.Join(s.write(s.record), s.folder.unmount(false))
}

// remove removes all of the session. After an error the next attempt finds what is left.
func (s *session) remove(ctx context.Context) error {
	err := s.end(ctx)
	if err == nil {
		err = s.folder.remove(ctx, s.options.EndLimit)
	}
	if err != nil {
		return fmt.Errorf("remove what is left of session %s: %w", s.folder.id(), err)
	}
	// There may be another of this name.
	s.record, s.written, s.pace = rules.Record{BootID: s.record.BootID}, rules.Record{}, rules.Pace{}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = mps.Status{}
	return nil
}

// accept makes these servers the session's. They have its limits then.
func (s *session) accept(ctx context.Context, c commands, servers []rules.Server) error {
	if err := c.setLimits(ctx, s.record.Spec, servers); err != nil {
		return err
	}
	ids := rules.IDs(servers)
	shared, err := s.folder.memory().isNeeded()
	if err != nil {
		return err
	}
	accepted := s.record
	accepted.SharesMemory = accepted.SharesMemory || shared
	accepted.Servers, accepted.ServerUser = ids, servers[0].User
	accepted.Started, accepted.Serving = true, true
	again := s.record.Started
	if err := s.write(accepted); err != nil {
		return err
	}
	s.watch.servers(ids)
	s.pace = rules.Pace{Failures: s.pace.Failures, Next: s.pace.Next, Ready: time.Now()}
	if again {
		klog.FromContext(ctx).Info("MPS session runs again", "daemon", s.record.Daemon.PID, "losses", s.record.Losses)
	}
	return nil
}

// changeLimits changes the limits of a running session, or restores the old ones.
func (s *session) changeLimits(ctx context.Context, c commands, wanted mps.Spec) error {
	changed := s.record
	changed.Spec = wanted.ResetPriority(s.record.Spec)
	if err := c.changeLimits(ctx, s.record.Spec, changed.Spec, s.record.Servers); err != nil {
		return err
	}
	if err := s.write(changed); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("MPS limits changed", "new", changed.Spec, "servers", len(changed.Servers))
	return nil
}
