// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/util/wait"
)

// commands are what a daemon that answers is told.
type commands struct {
	control.Client
	options Options
}

// startServer tells the daemon to start a server, which then is waited for.
func (c commands) startServer(ctx context.Context, f folder, spec mps.Spec) error {
	// An adopted daemon may never have had them.
	if err := c.SetLimits(ctx, spec, 0); err != nil {
		return err
	}
	// Programs that wait for the daemon get a server with these limits. They should not
	// wait for longer: one that finds no daemon runs without limits.
	if err := f.publish(append([]string{controlSocket}, c.options.ExtraContainerFiles...)); err != nil {
		return err
	}
	c.Limit = c.options.StartLimit
	if err := c.StartServer(ctx); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	return nil
}

// setLimits sets the limits of active servers that do not have them. Containers cannot change them, but root on the node can.
func (c commands) setLimits(ctx context.Context, spec mps.Spec, servers []rules.Server) error {
	for i := range servers {
		if servers[i].Unlimited == "" {
			continue
		}
		klog.FromContext(ctx).Info("Setting the limits of an MPS server", "pid", servers[i].ID.PID, "reason", servers[i].Unlimited)
		// The next server first: if this is cut short, the next observation finds this one without its limits.
		if err := c.SetLimits(ctx, spec, 0, servers[i].ID.PID); err != nil {
			return err
		}
	}
	return nil
}

// changeLimits changes the limits of servers, and of those that come, or restores the old ones.
func (c commands) changeLimits(ctx context.Context, old, spec mps.Spec, running []process.ID) error {
	servers := append(process.PIDs(running), 0)
	err := c.SetLimits(ctx, spec, servers...)
	if err == nil || errors.Is(err, control.ErrNoPriorities) {
		return err // nothing was set
	}
	if undoErr := c.SetLimits(context.WithoutCancel(ctx), old.ResetPriority(spec), servers...); undoErr != nil {
		return fmt.Errorf("%w; restore the old limits: %w", err, undoErr)
	}
	return err
}

// shutDown ends servers.
func (c commands) shutDown(ctx context.Context, servers []process.ID) error {
	ctx, cancel := context.WithTimeout(ctx, c.options.EndLimit)
	defer cancel()
	for _, server := range servers {
		err := c.ShutdownServer(ctx, server.PID)
		if err == nil {
			err = wait.Until(ctx, func() (bool, error) { return !server.Alive(), nil })
		}
		if err != nil {
			return fmt.Errorf("shut down the server (%s): %w", server, err)
		}
	}
	return nil
}

// terminations is how many clients are terminated at the same time.
const terminations = 8

// terminate ends what clients have on the GPU whose pod is about to be killed. One that cannot be terminated, or whose termination
// hangs, keeps no other from it, and is tried again soon.
func (c commands) terminate(ctx context.Context, doomed []rules.Client, w *watch) {
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(ctx, c.options.CommandLimit)
	defer cancel()
	var all errgroup.Group
	all.SetLimit(terminations)
	for _, one := range doomed {
		known := w.client(one.PID)
		if known == nil {
			continue // it has ended
		}
		known.tried = time.Now()
		all.Go(func() error {
			err := c.Terminate(ctx, one.Server, one.PID)
			switch {
			case err == nil:
				known.terminated = true
				logger.Info("Terminated an MPS client whose pod is about to be killed", "pid", one.PID, "server", one.Server)
			case !known.process.Ended():
				logger.Error(err, "An MPS client cannot be terminated before its pod is killed", "pid", one.PID, "podUID", known.pod.UID)
			}
			return nil
		})
	}
	_ = all.Wait() // each has said what has failed
}
