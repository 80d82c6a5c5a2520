// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
)

// Partitions are the GPUs. The effects are idempotent, and the caller holds the
// GPU's lock. With dynamic false, MIG mode is never touched.
type Partitions interface {
	// State lists all instances of a GPU, foreign ones included. The error wraps
	// gpu.ErrNotSupported on a GPU without MIG.
	State(ctx context.Context, pciAddress string) (gpu.MIGState, error)
	// Ensure makes a partition, or completes what is there if it is the expected one,
	// completely or not at all. Otherwise the error wraps partition.ErrForeign.
	Ensure(ctx context.Context, at partition.Address, expect partition.Expect, dynamic bool) (partition.Live, error)
	// Destroy succeeds when nothing is there, or a partition with another UUID,
	// which stays. An empty uuid stands for any.
	Destroy(ctx context.Context, at partition.Address, uuid string, dynamic bool) error
	// EnsureWhole fails when a GPU is divided.
	EnsureWhole(ctx context.Context, pciAddress string, dynamic bool) error
	// FabricJoined fails while an undivided GPU is not registered with its NVLink fabric.
	FabricJoined(ctx context.Context, pciAddress string) error
}

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
	// Sessions returns those of the node by ID. The error wraps
	// sharing.ErrNoSupervisor when they cannot be known.
	Sessions(ctx context.Context) (map[string]mps.Status, error)
	// SetInterval sets the time slice of a whole GPU; IntervalDefault takes back what
	// was set.
	SetInterval(ctx context.Context, d sharing.Device, interval sharing.Interval) error
}

// CDI writes and removes a claim's spec. Both are idempotent.
type CDI interface {
	// Write returns the qualified name of each device.
	Write(ctx context.Context, claimUID types.UID, devices []cdi.Device) (map[string]string, error)
	// Matches reports whether the spec that is there is what Write would write.
	Matches(ctx context.Context, claimUID types.UID, devices []cdi.Device) (bool, error)
	Remove(claimUID types.UID) error
}

// Kit is what steps are made of.
type Kit struct {
	Partitions Partitions
	Sharing    Sharing
	CDI        CDI
	// Roots are where device numbers are looked up.
	Roots host.Roots
	// Hook is a program on the host that checks before a container starts whether its
	// limits hold.
	Hook   string
	Limits SoftLimits
}
