// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
)

// ownedPartition is a MIG partition that is made with the first claim that has a share
// of it, or the only one, and destroyed with the last.
type ownedPartition struct {
	*Kit
	key string
}

func (p ownedPartition) Check(s *Scene) error {
	d := s.Record.Device(p.key)
	if err := checkPlace(s, d); err != nil {
		return err
	}
	if err := p.checkSharers(s, d); err != nil {
		return err
	}
	at := slices.IndexFunc(s.Instances[d.PCIAddress], d.At)
	if at < 0 {
		return nil
	}
	return p.explain(s, d, p.expect(s, d).Check(s.Instances[d.PCIAddress][at]))
}

// expect says which instance may be at the address already. One that no record explains
// was made by somebody else, whatever is in it, and must not be destroyed when the claim
// ends.
func (p ownedPartition) expect(s *Scene, d *journal.Device) partition.Expect {
	if uuid := siblingUUID(s.Record, d); uuid != "" {
		return partition.ExpectUUID(uuid)
	}
	sharers := sharersOf(s, d)
	left, gone := s.gone[p.key]
	switch {
	case sharers.live != "":
		return partition.ExpectUUID(sharers.live)
	case gone:
		return left
	case s.Attempt == First && !sharers.unknown && sharers.releasing != "":
		// Its compute instance is gone, the GPU instance may be left.
		return partition.ExpectUUID(sharers.releasing)
	case s.Attempt == First && !sharers.unknown:
		return partition.ExpectNothing
	case d.Partition.OwnUUID() != "":
		return partition.ExpectUUID(d.Partition.OwnUUID())
	}
	return partition.ExpectOurs
}

// siblingUUID is that of another share of the same claim, which comes first.
func siblingUUID(r *journal.Record, d *journal.Device) string {
	for i := range r.Devices {
		if sibling := &r.Devices[i]; sibling != d && sibling.Owned() && sibling.SamePlace(d) && sibling.Partition.LiveUUID() != "" {
			return sibling.Partition.LiveUUID()
		}
	}
	return ""
}

// sharers are what the records of other claims say of a partition that they share: the
// UUID of the one that is there, and that of one that is being released and is not.
type sharers struct {
	live, releasing string
	// unknown: it may have been made for one by a process that died before it knew the
	// UUID.
	unknown bool
}

func sharersOf(s *Scene, d *journal.Device) (found sharers) {
	for _, other := range d.Sharers(s.Others.Records) {
		uuid := other.Partition.OwnUUID()
		switch {
		case uuid == "":
			found.unknown = true
		case gpu.HasMIGDevice(s.Instances[d.PCIAddress], uuid):
			found.live = uuid
		case other.Record.State == journal.Unpreparing:
			found.releasing = uuid
		}
	}
	return found
}

func (p ownedPartition) explain(s *Scene, d *journal.Device, err error) error {
	if errors.Is(err, partition.ErrForeign) {
		return notBegun(fmt.Errorf("%w%s", err, s.Others.Explain(d.PCIAddress)))
	}
	return err
}

// checkSharers makes sure that the partition is the one that other claims have shares
// of. When that is gone, they have lost what they had; another one in its place would be
// mistaken for theirs, or for somebody else's.
func (p ownedPartition) checkSharers(s *Scene, d *journal.Device) error {
	instances := s.Instances[d.PCIAddress]
	for _, other := range d.Sharers(s.Others.Holders()) {
		uuid := other.Partition.OwnUUID()
		if uuid == "" || gpu.HasMIGDevice(instances, uuid) {
			continue
		}
		now := "it is made again when that claim is released"
		if i := slices.IndexFunc(instances, d.At); i >= 0 && len(instances[i].Compute) == 1 {
			now = instances[i].Compute[0].UUID + " is in its place; the device can be used again when that claim is released"
		}
		return fmt.Errorf("partition %s, of which claim %s has a share, is gone; %s", uuid, other.Record.Claim, now)
	}
	return nil
}

func (p ownedPartition) Apply(ctx context.Context, s *Scene) error {
	d := s.Record.Device(p.key)
	live, err := p.Partitions.Ensure(ctx, d.Address(), p.expect(s, d), d.DynamicMIG)
	if err != nil {
		return p.explain(s, d, err)
	}
	d.Partition.Live, d.Partition.UUID, d.Partition.Remaking = &live, live.UUID, false
	return nil
}

func (p ownedPartition) Undo(ctx context.Context, s *Scene) error {
	d := s.Record.Device(p.key)
	if d.SharedBy(s.Others.Holders()) {
		return nil
	}
	if path := s.Others.MayPartition(d.PCIAddress); d.IsShare() && path != "" {
		return fmt.Errorf("%w (%s)", ErrUnclear, path)
	}
	return p.Partitions.Destroy(ctx, d.Address(), d.Partition.OwnUUID(), d.DynamicMIG)
}

func (p ownedPartition) Forget(r *journal.Record) { r.Remove(p.key) }

// MarkGone notes which partitions that were made for the claim do not exist any more, so
// that Apply makes them again, and reports whether there are any. Until the record with
// these marks is written down, the partitions must not be made: another process would
// take them for somebody else's. A GPU instance that has lost its compute instance is
// completed, which may give another UUID as well.
func MarkGone(s *Scene) (gone bool) {
	for i := range s.Record.Devices {
		d := &s.Record.Devices[i]
		uuid := d.Partition.OwnUUID()
		if !d.Owned() || uuid == "" {
			continue // none is made, or any UUID is the claim's
		}
		left := partition.ExpectNothing
		instances := s.Instances[d.PCIAddress]
		if at := slices.IndexFunc(instances, d.At); at >= 0 {
			if len(instances[at].Compute) > 0 {
				continue // it is there, or Check refuses what is
			}
			left = partition.ExpectUUID(uuid)
		}
		p := d.Partition
		p.UUID, p.Live, p.Remaking = uuid, nil, true
		if s.gone == nil {
			s.gone = map[string]partition.Expect{}
		}
		s.gone[d.Key()], gone = left, true
	}
	return gone
}

// UnmarkGone notes which partitions were not made again after all, as the instances on
// their GPUs show.
func UnmarkGone(r *journal.Record, instances map[string][]gpu.Instance) {
	for i := range r.Devices {
		if d := &r.Devices[i]; d.Owned() && d.Partition.Live == nil && !slices.ContainsFunc(instances[d.PCIAddress], d.At) {
			d.Partition.Remaking = false
		}
	}
}

// Lost returns the claims on a GPU whose partition does not exist any more. Ids of
// instances are used again, so that their CDI specs may come to name the next partition.
func Lost(others *journal.Snapshot, pciAddress string, instances []gpu.Instance) []journal.Held {
	var lost []journal.Held
	for _, d := range others.On(pciAddress) {
		if d.Partition.LiveUUID() != "" && !d.IsIn(instances) {
			lost = append(lost, d)
		}
	}
	return lost
}
