// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/urfave/cli/v3"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor"
	"github.com/partage-dev/partage/pkg/node/command"
	"github.com/partage-dev/partage/pkg/node/healthsocket"
	"github.com/partage-dev/partage/pkg/util/version"
)

// serve runs the supervisor until ctx ends.
func serve(ctx context.Context, c *config, cmd *cli.Command) error {
	if err := c.validate(); err != nil {
		return err
	}
	if err := c.process.SetUpLogging(); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting", append([]any{"version", version.Get()}, command.InEffect(cmd)...)...)
	stop, err := c.serveHealth(ctx)
	if err != nil {
		return err
	}
	defer stop()
	return supervisor.Run(ctx, supervisor.Options{
		Dir:                 filepath.Clean(c.mpsDir),
		Roots:               c.roots(),
		CheckInterval:       c.checkInterval,
		ExtraContainerFiles: c.containerFiles(),
		PodsSocket:          c.podsSocket,
		SELinuxContext:      c.seLinux,
		MemoryPercent:       c.memoryPercent,
	})
}

// serveHealth answers from the start, so that a supervisor which waits for an earlier
// one to end does not count as dead.
func (c *config) serveHealth(ctx context.Context) (stop func(), err error) {
	listener, err := c.process.ListenHealth(ctx)
	if err != nil || listener == nil {
		return func() {}, err
	}
	client, err := mps.NewClient(filepath.Join(c.mpsDir, mps.SocketName))
	if err != nil {
		return nil, err
	}
	return healthsocket.Serve(ctx, listener, checks(client.List), func(err error) {
		klog.FromContext(ctx).Error(err, "Health socket is no longer served")
	}), nil
}

// checks ask as the plugin would, through the socket.
func checks(list func(context.Context) ([]mps.Status, error)) healthsocket.Checks {
	return healthsocket.Checks{
		Readiness: func(ctx context.Context) error {
			_, err := list(ctx)
			return err
		},
		// Without a listener on the socket an earlier supervisor still has the folder. A
		// restart would not help; a supervisor that hangs must be restarted.
		Liveness: func(ctx context.Context) error {
			if _, err := list(ctx); err != nil && !errors.Is(err, mps.ErrUnavailable) {
				return err
			}
			return nil
		},
	}
}
