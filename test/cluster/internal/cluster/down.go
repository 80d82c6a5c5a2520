// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/partage-dev/partage/test/cluster/internal/cgroup"
	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
)

const downLimit = 30 * time.Second

// Down ends the cluster and removes what it left: processes, mounts, control groups, network devices, files. The logs stay.
// It also cleans up after a run that was killed, and it is no error when there is nothing to do; found says whether there was.
func Down(ctx context.Context, c layout.Cluster) (found bool, err error) {
	if err := root(); err != nil {
		return false, err
	}
	unlock, err := lock(c)
	if err != nil {
		return false, err
	}
	defer unlock()
	groups, err := cgroup.Find(c.ID())
	if err != nil {
		return false, err
	}
	_, err = os.Stat(c.Run())
	found = len(groups) > 0 || err == nil
	return found, clean(ctx, c)
}

// clean needs the lock. It goes by names, not by the record alone: that may be lost.
func clean(ctx context.Context, c layout.Cluster) error {
	state, err := Load(c)
	if err != nil {
		state = nil // damaged: the control groups still tell the processes
	}
	if state != nil {
		// The kernel ends every process of its namespace with it; mounts and network devices go with the namespaces.
		for _, first := range state.First {
			if err := first.end(ctx); err != nil {
				return err
			}
		}
	}
	if err := cgroup.Remove(ctx, c.ID(), downLimit); err != nil {
		return err
	}
	if err := sandbox.UnmountBelow(c.Run()); err != nil {
		return err
	}
	if err := os.RemoveAll(c.Run()); err != nil {
		return fmt.Errorf("remove the cluster's files: %w", err)
	}
	if err := os.Remove(c.Kubeconfig()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the kubeconfig: %w", err)
	}
	return nil
}

func root() error {
	if os.Geteuid() != 0 {
		return errors.New("a node needs root (it makes namespaces, mounts and control groups): run this with sudo")
	}
	return nil
}
