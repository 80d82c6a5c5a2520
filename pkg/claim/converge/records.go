// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"slices"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/policy"
)

// observeRecords reads what the disk says of claims on the GPU, and what calls of this process want there. A call takes the
// place of a record of an earlier boot, and comes besides one that is being released.
func (o *observation) observeRecords() {
	wanted := map[*Call]bool{}
	o.engine.calls.Range(func(_, c any) bool {
		if call, _ := c.(*Call); hasGPU(call.Wanted, o.GPU) {
			wanted[call] = true
		}
		return true
	})
	for _, r := range o.snapshot.All() {
		call := o.engine.call(r.Claim.UID)
		// What the claim had elsewhere has to go before it can have a new record.
		leaves := r.State == record.Releasing && wanted[call]
		if !hasGPU(r, o.GPU) && !leaves || r.BootID != o.Boot && call != nil {
			continue
		}
		one := o.recorded(r, call)
		o.Records = append(o.Records, one)
		if one.Phase != rules.Releasing {
			delete(wanted, call)
		}
	}
	for call := range wanted {
		one := convert(call.Wanted, call)
		one.Calling = true
		o.Records = append(o.Records, one)
	}
}

// recorded is what the disk says of a claim.
func (o *observation) recorded(r *record.Record, call *Call) rules.Record {
	one := convert(r, call)
	switch r.State {
	case record.Preparing:
		// Another process's Prepare may be at work.
		one.Phase, one.Calling = rules.Preparing, call != nil || o.engine.Locks.ClaimElsewhere(r.Claim.UID)
	case record.Prepared:
		one.Phase, one.Calling, one.Orphan = rules.Prepared, call != nil, o.isOrphan(r)
		one.Outdated = call != nil && call.Wanted.Arrived > r.Arrived
	default:
		one.Phase = rules.Releasing
	}
	return one
}

func (o *observation) isOrphan(r *record.Record) bool {
	return o.engine.Orphan != nil && o.engine.Orphan(r.Claim.UID, r.Arrived)
}

func convert(r *record.Record, call *Call) rules.Record {
	one := rules.Record{Claim: r.Claim.UID, Name: r.Claim.String(), Boot: r.BootID}
	for i := range r.Devices {
		one.Parts = append(one.Parts, partOf(r, &r.Devices[i], call))
	}
	return one
}

func partOf(r *record.Record, d *record.Device, call *Call) rules.Part {
	p := rules.Part{
		Key: d.Key(), Device: d.Device, GPU: d.PCIAddress, Admin: d.Admin, Divisible: d.Divisible, Dynamic: d.DynamicMIG,
		Shared: d.Type.IsShare(), Interval: d.Shared().Interval, Mark: rules.Mark(d.Mark), InstanceID: rules.NoInstance,
	}
	if call != nil {
		p.Clients = call.Clients[d.Device]
	}
	if d.Partition != nil {
		p.Kind = rules.Partition
		p.Place = rules.Place{ProfileID: d.Partition.ProfileID, Placement: d.Partition.Placement}
		if made := d.Partition.Made; made != nil {
			p.InstanceID, p.UUID = made.InstanceID, made.UUID
		}
	}
	if d.Type == record.Static {
		p.Kind = rules.Static
	}
	if d.Sharing == nil || d.Sharing.Session == "" {
		return p
	}
	s := r.Session(d.Sharing.Session)
	p.Session, p.Own = d.Sharing.Session, s != nil && !s.Shared
	p.Demand = rules.Demand{
		Percent: d.Sharing.Limits.Percent, MemoryBytes: d.Sharing.Limits.MemoryBytes,
		BelowNormal: d.Sharing.ClientPriority == policy.PriorityBelowNormal, Priorities: d.Sharing.ClientPriority != "",
		Restart: d.Sharing.OnClientKilled == policy.KilledRestart,
	}
	return p
}

// sameWish reports whether a record is about what is wanted: the same devices, shared in the same way. What the policy
// decides is as it was when the record was made.
func sameWish(r, wanted *record.Record) bool {
	if len(r.Devices) != len(wanted.Devices) || len(r.Sessions) != len(wanted.Sessions) {
		return false
	}
	for i := range wanted.Devices {
		d := &wanted.Devices[i]
		if was := r.Device(d.Key()); was == nil || !sameDevice(was, d) {
			return false
		}
	}
	for i := range wanted.Sessions {
		s := &wanted.Sessions[i]
		was := r.Session(s.ID)
		if was == nil || was.Shared != s.Shared || was.MultiUser != s.MultiUser || was.Percent != s.Percent || !sameLimits(was.Devices, s.Devices) {
			return false
		}
	}
	return true
}

func sameDevice(a, b *record.Device) bool {
	if a.PCIAddress != b.PCIAddress || a.Type != b.Type || a.Admin != b.Admin || (a.Partition == nil) != (b.Partition == nil) {
		return false
	}
	if a.Partition != nil && a.Address() != b.Address() {
		return false
	}
	was, is := a.Shared(), b.Shared()
	return was.Session == is.Session && was.Limits == is.Limits && was.Limited == is.Limited
}

func sameLimits(a, b []record.SessionDevice) bool {
	return slices.EqualFunc(a, b, func(x, y record.SessionDevice) bool { return x.Device == y.Device && x.MemoryBytes == y.MemoryBytes })
}
