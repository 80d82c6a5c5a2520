// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/mps/process"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/wait"
)

// act does one thing. What it has done is observed afterwards.
func (s *session) act(ctx context.Context, d *rules.Decision, o *rules.Observation) error {
	switch d.Do {
	case rules.Remove:
		return s.remove(ctx)
	case rules.Suspend:
		return s.suspend(ctx)
	case rules.Start:
		return s.start(ctx)
	case rules.Stop:
		return s.stop(ctx, d)
	case rules.RecordSockets:
		return s.recordSockets()
	case rules.Rest, rules.Look, rules.Save:
		return nil // nothing is left to do
	}
	client, err := s.daemon.client(&s.record)
	if err != nil {
		return err
	}
	alive, cancel := s.daemon.keeper.Context(ctx, "the control daemon")
	defer cancel()
	switch d.Do { //nolint:exhaustive // the others need no daemon that answers
	case rules.StartServer:
		return s.startServer(alive, client)
	case rules.Accept:
		return s.accept(alive, client, o.Servers)
	case rules.SetLimits:
		return s.setLimits(alive, client, o.Servers)
	case rules.ChangeLimits:
		return s.changeLimits(alive, client, o)
	case rules.Terminate:
		s.terminate(alive, client, o.Doomed)
		return nil
	case rules.ReplaceServers:
		return s.replaceServers(ctx, client, d)
	}
	return fmt.Errorf("nothing is known of action %d", d.Do)
}

// start starts a daemon, after what is left of an earlier one has ended.
func (s *session) start(ctx context.Context) error {
	program, err := newControlProgram(s.options.Roots, s.folder)
	if err != nil {
		return err
	}
	if err := checkNodes(ctx, s.options.Roots); err != nil {
		return err
	}
	// From here on the next supervisor finds everything that follows.
	if err := s.folder.make(); err != nil {
		return err
	}
	if err := s.folder.save(s.record); err != nil {
		return err
	}
	if err := s.end(ctx); err != nil {
		return err
	}
	if err := s.memory.mount(s.folder, s.record.Spec); err != nil {
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
	return s.folder.save(s.record)
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
		return fmt.Errorf("session %s: %w", s.id, err)
	}
	s.shrink(ctx)
	return errors.Join(s.folder.save(s.record), s.folder.unmount(ctx, s.options.EndLimit))
}

// remove removes all of the session. After an error the next attempt finds what is left.
func (s *session) remove(ctx context.Context) error {
	if s.record.Started {
		// The next supervisor must not start it again. A full disk is no reason to
		// keep it running.
		if err := s.folder.save(s.record); err != nil && !errors.Is(err, os.ErrNotExist) {
			klog.FromContext(ctx).Error(err, "Removing an MPS session without a record of it")
		}
	}
	err := s.end(ctx)
	if err == nil {
		s.shrink(ctx)
		err = s.folder.unmount(ctx, s.options.EndLimit)
	}
	if err == nil {
		err = s.folder.delete(ctx)
	}
	if err != nil {
		return fmt.Errorf("remove what is left of session %s: %w", s.id, err)
	}
	s.gone = true
	return nil
}

// shrink leaves nothing of the session's /dev/shm to those who have kept it. What they have unlinked and still open keeps no
// session from ending: it is no more than the session could have.
func (s *session) shrink(ctx context.Context) {
	if mounted, err := (mount{path: s.folder.shm()}).mounted(); !mounted || err != nil {
		return // unmount says what is wrong
	}
	ctx, cancel := context.WithTimeout(ctx, s.options.EndLimit)
	defer cancel()
	if err := host.ShrinkTmpfs(ctx, s.folder.shm()); err != nil {
		klog.FromContext(ctx).Error(err, "Somebody keeps memory of an MPS session that has ended")
	}
}

// recordSockets writes down which sockets the daemon has made, and so which process it is.
func (s *session) recordSockets() error {
	id := s.daemon.id
	s.record.Sockets, s.record.Daemon = s.daemon.sockets, &id
	return s.folder.save(s.record)
}

// startServer tells the daemon to start a server, which then is waited for.
func (s *session) startServer(ctx context.Context, client control.Client) error {
	// An adopted daemon may never have had them.
	if err := client.SetLimits(ctx, s.record.Spec, 0); err != nil {
		return err
	}
	// Programs that wait for the daemon get a server with these limits. They should not
	// wait for longer: one that finds no daemon runs without limits.
	if err := s.folder.publish(s.options.containerFiles()); err != nil {
		return err
	}
	_, err := client.WithLimit(s.options.StartLimit).StartServer(ctx)
	if s.pace.Parent = time.Now(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	return nil
}

// accept makes these servers the session's. They have its limits then.
func (s *session) accept(ctx context.Context, client control.Client, servers []rules.Server) error {
	if err := s.setLimits(ctx, client, servers); err != nil {
		return err
	}
	ids := idsOf(servers)
	shared, err := s.folder.hasSharedMemory()
	if err != nil {
		return err
	}
	accepted := s.record
	accepted.SharesMemory = accepted.SharesMemory || shared
	accepted.Servers, accepted.ServerUser = ids, servers[0].User
	accepted.Started, accepted.Serving = true, true
	if err := s.folder.save(accepted); err != nil {
		return err
	}
	again := s.record.Started
	s.record = accepted
	s.watch.servers(ids)
	s.pace = rules.Pace{Failures: s.pace.Failures, Next: s.pace.Next, Ready: time.Now()}
	if again {
		klog.FromContext(ctx).Info("MPS session runs again", "daemon", s.record.Daemon.PID, "losses", s.record.Losses)
	}
	return nil
}

func idsOf(servers []rules.Server) (ids []process.ID) {
	for i := range servers {
		ids = append(ids, servers[i].ID)
	}
	return ids
}

// setLimits sets the limits of active servers that do not have them. Containers cannot change them, but root on the node can.
func (s *session) setLimits(ctx context.Context, client control.Client, servers []rules.Server) error {
	for i := range servers {
		if servers[i].Unlimited == "" {
			continue
		}
		klog.FromContext(ctx).Info("Setting the limits of an MPS server", "pid", servers[i].ID.PID, "reason", servers[i].Unlimited)
		// The next server first: whoever does not come to the end finds this one without its limits.
		if err := client.SetLimits(ctx, s.record.Spec, 0, servers[i].ID.PID); err != nil {
			return err
		}
	}
	return nil
}

// changeLimits changes the limits of a running session, or restores the old ones.
func (s *session) changeLimits(ctx context.Context, client control.Client, o *rules.Observation) error {
	servers := append(process.PIDs(s.record.Servers), 0)
	old, spec := s.record.Spec, o.Wanted.ResetPriority(s.record.Spec)
	if err := client.SetLimits(ctx, spec, servers...); err != nil {
		if errors.Is(err, control.ErrNoPriorities) {
			return err // nothing was set
		}
		if undoErr := client.SetLimits(context.WithoutCancel(ctx), old.ResetPriority(spec), servers...); undoErr != nil {
			return fmt.Errorf("%w; restore the old limits: %w", err, undoErr)
		}
		return err
	}
	changed := s.record
	changed.Spec = spec
	if err := s.folder.save(changed); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("MPS limits changed", "percentage", spec.ThreadPercentage, "memory", spec.Memory, "priority", spec.ClientPriority,
		"oldPercentage", old.ThreadPercentage, "oldMemory", old.Memory, "servers", len(changed.Servers))
	s.record = changed
	return nil
}

// replaceServers ends the servers. Where the daemon does not do what it is told, it is ended as well.
func (s *session) replaceServers(ctx context.Context, client control.Client, d *rules.Decision) error {
	klog.FromContext(ctx).Info("Replacing MPS servers", "servers", process.PIDs(s.record.Servers), "reason", d.Message)
	limited, cancel := context.WithTimeout(ctx, s.options.EndLimit)
	defer cancel()
	for _, server := range s.record.Servers {
		err := client.ShutdownServer(limited, server.PID)
		if err == nil {
			err = wait.Until(limited, func() (bool, error) { return !server.Alive(), nil })
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "MPS servers do not end: their daemon is ended, too")
			return s.end(ctx)
		}
	}
	return nil
}

// terminate ends what clients have on the GPU whose pod is about to be killed. One that cannot be terminated keeps no other
// from it, and is tried again soon.
func (s *session) terminate(ctx context.Context, ctl control.Client, clients []rules.Client) {
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(ctx, s.options.CommandLimit)
	defer cancel()
	for _, doomed := range clients {
		c := s.watch.client(doomed.PID)
		if c == nil {
			continue // it has ended
		}
		c.tried = time.Now()
		err := ctl.Terminate(ctx, doomed.Server, doomed.PID)
		switch {
		case err == nil:
			c.terminated = true
			logger.Info("Terminated an MPS client whose pod is about to be killed", "pid", doomed.PID, "server", doomed.Server)
		case !c.process.Ended():
			logger.Error(err, "An MPS client cannot be terminated before its pod is killed", "pid", doomed.PID, "podUID", c.pod.UID)
		}
	}
}
