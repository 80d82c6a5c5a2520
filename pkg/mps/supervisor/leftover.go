// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/logchange"
)

// ageInLooks is how old what is left over is at least, in intervals between looks.
const ageInLooks = 10

// each does something for the folder of each session now and then, until ctx ends.
func (s *Supervisor) each(ctx context.Context, interval time.Duration, problem string, do func(f folder) error) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var last logchange.Problem
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		var errs []error
		for _, id := range s.ids() {
			errs = append(errs, do(s.folder(id)))
		}
		if ctx.Err() == nil {
			last.Log(ctx, errors.Join(errs...), problem, "")
		}
	}
}

// removeLeftover removes what ended containers left in the /dev/shm of a session.
func (s *Supervisor) removeLeftover(ctx context.Context, f folder) error {
	if mounted, err := host.IsMountPoint(f.shm()); !mounted || err != nil {
		return nil //nolint:nilerr // it is being made, or removed
	}
	removed, err := host.RemoveUnused(ctx, f.shm(), time.Now().Add(-ageInLooks*s.options.LeftoverInterval))
	if removed > 0 {
		klog.FromContext(ctx).Info("Removed what ended containers left in /dev/shm", "session", f.id(), "files", removed)
	}
	return err
}
