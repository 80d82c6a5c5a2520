// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/sharing"
)

// Sharing makes devices shared. The effects are idempotent, and the caller holds
// the locks of all GPUs of a session.
type Sharing interface {
	// Start makes a session run with these limits, or brings the one that runs to
	// them, completely or not at all. A compute mode that somebody else set is an
	// error, unless adopt says that this driver may have set it. An error that
	// wraps sharing.ErrLeft has left something for Stop, others have not.
	Start(ctx context.Context, s sharing.Session, adopt bool) (sharing.Live, error)
	// Stop ends a session and then lets all processes use its devices again. It
	// succeeds when there is no session, or a device is gone.
	Stop(ctx context.Context, s sharing.Session) error
	// Sessions are those of the node by ID. The error wraps sharing.ErrNoSupervisor
	// when it cannot be known.
	Sessions(ctx context.Context) (map[string]mps.Status, error)
	// SetInterval of a whole GPU; IntervalDefault takes back what was set.
	SetInterval(ctx context.Context, d sharing.Device, interval sharing.Interval) error
}
