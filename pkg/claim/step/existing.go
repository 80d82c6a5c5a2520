// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"
	"fmt"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
)

// existing is a partition that this claim does not make: one that somebody else made, or
// one that the claim observes with admin access. There is nothing to undo.
type existing struct {
	*Kit
	key string
}

func (e existing) Check(s *Scene) error {
	d := s.Record.Device(e.key)
	if err := checkPlace(s, d); err != nil {
		return err
	}
	_, err := e.find(d, s.Instances[d.PCIAddress])
	return err
}

func (e existing) find(d *journal.Device, instances []gpu.Instance) (partition.Live, error) {
	live, found := partition.Lookup(gpu.MIGState{Instances: instances}, d.Address())
	if d.Admin {
		if !found {
			return live, fmt.Errorf("there is no partition with %s now, and admin access does not make one", d.Address())
		}
		return live, nil
	}
	// The claim keeps the one that it was allocated: nobody would notice another.
	switch own := d.Partition.OwnUUID(); {
	case !found:
		return live, fmt.Errorf("partition %s with %s was not made by this driver and is not there any more", own, d.Address())
	case own != "" && live.UUID != own:
		return live, fmt.Errorf("partition %s was not made by this driver and is not there any more, %s is in its place", own, live.UUID)
	}
	return live, nil
}

func (e existing) Apply(_ context.Context, s *Scene) error {
	d := s.Record.Device(e.key)
	live, err := e.find(d, s.Instances[d.PCIAddress])
	if err != nil {
		return notBegun(err)
	}
	d.Partition.Live = &live
	return nil
}

func (existing) Undo(context.Context, *Scene) error { return nil }

func (e existing) Forget(r *journal.Record) { r.Remove(e.key) }
