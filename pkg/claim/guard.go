// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"

	"github.com/partage-dev/partage/pkg/claim/lock"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
)

// guardedPartitions reports calls that do not return to the locks, wherever they are
// made from and whatever becomes of the error.
type guardedPartitions struct {
	partitions Partitions
	locks      *lock.Locks
}

func (g guardedPartitions) State(ctx context.Context, pciAddress string) (gpu.MIGState, error) {
	state, err := g.partitions.State(ctx, pciAddress)
	return state, g.locks.Watch(pciAddress, err)
}

func (g guardedPartitions) Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	processes, err := g.partitions.Processes(ctx, pciAddress)
	return processes, g.locks.Watch(pciAddress, err)
}

func (g guardedPartitions) Ensure(ctx context.Context, at partition.Address, expect partition.Expect, dynamic bool) (partition.Live, error) {
	live, err := g.partitions.Ensure(ctx, at, expect, dynamic)
	return live, g.locks.Watch(at.PCIAddress, err)
}

func (g guardedPartitions) Destroy(ctx context.Context, at partition.Address, uuid string, dynamic bool) error {
	return g.locks.Watch(at.PCIAddress, g.partitions.Destroy(ctx, at, uuid, dynamic))
}

func (g guardedPartitions) EnsureWhole(ctx context.Context, pciAddress string, dynamic bool) error {
	return g.locks.Watch(pciAddress, g.partitions.EnsureWhole(ctx, pciAddress, dynamic))
}

func (g guardedPartitions) FabricJoined(ctx context.Context, pciAddress string) error {
	return g.locks.Watch(pciAddress, g.partitions.FabricJoined(ctx, pciAddress))
}

// guardedSharing is guardedPartitions for what makes devices shared.
type guardedSharing struct {
	sharing step.Sharing
	locks   *lock.Locks
}

func (g guardedSharing) Start(ctx context.Context, s sharing.Session, adopt bool) (sharing.Live, error) {
	live, err := g.sharing.Start(ctx, s, adopt)
	return live, g.locks.Watch("", err)
}

func (g guardedSharing) Stop(ctx context.Context, s sharing.Session) error {
	return g.locks.Watch("", g.sharing.Stop(ctx, s))
}

func (g guardedSharing) SetInterval(ctx context.Context, d sharing.Device, interval sharing.Interval) error {
	return g.locks.Watch("", g.sharing.SetInterval(ctx, d, interval))
}

func (g guardedSharing) Sessions(ctx context.Context) (map[string]mps.Status, error) {
	return g.sharing.Sessions(ctx)
}
