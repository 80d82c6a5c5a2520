// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/host"
)

// ageInLooks is how old what is left over is at least, in intervals between looks.
const ageInLooks = 10

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
