// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"slices"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
)

// records are what the disk says of claims on a GPU, and what calls of this process want there. A call takes the place of
// a record of an earlier boot, and comes besides one that is being released.
func (e *Engine) records(pciAddress string, snapshot *record.Snapshot) []rules.Record {
	var all []rules.Record
	wanted := e.callsOn(pciAddress)
	for _, r := range slices.Concat(snapshot.Records, snapshot.Earlier) {
		call := e.call(r.Claim.UID)
		// What the claim had elsewhere has to go before it can have a new record.
		leaves := call != nil && r.State == record.Releasing && hasGPU(call.Wanted, pciAddress)
		if !hasGPU(r, pciAddress) && !leaves {
			continue
		}
		if r.BootID != e.Store.Boot() && call != nil {
			continue
		}
		one := e.recorded(r, call)
		all = append(all, one)
		if one.Phase != rules.Releasing {
			wanted = slices.DeleteFunc(wanted, func(c *Call) bool { return c == call })
		}
	}
	for _, call := range wanted {
		one := convert(call.Wanted, call)
		one.Calling = true
		all = append(all, one)
	}
	return all
}

// recorded is what the disk says of a claim.
func (e *Engine) recorded(r *record.Record, call *Call) rules.Record {
	one := convert(r, call)
	switch r.State {
	case record.Preparing:
		one.Phase, one.Calling = rules.Preparing, call != nil || e.isCalledElsewhere(r)
	case record.Prepared:
		one.Phase, one.Calling = rules.Prepared, call != nil
		one.Outdated = call != nil && call.Wanted.Arrived > r.Arrived
		one.Orphan = e.Orphan != nil && e.Orphan(r.Claim.UID, r.Arrived)
	default:
		one.Phase = rules.Releasing
	}
	return one
}

// isCalledElsewhere reports whether another process has the lock of a claim: its Prepare may be at work.
func (e *Engine) isCalledElsewhere(r *record.Record) bool {
	unlock, err := e.Locks.TryClaim(r.Claim.UID)
	if unlock != nil {
		unlock()
	}
	return err != nil || unlock == nil && e.Locks.ClaimElsewhere(r.Claim.UID)
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
		Shared: d.IsShare(), Interval: d.Interval(), Mark: rules.Mark(d.Mark), InstanceID: rules.NoInstance,
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
	var was, is record.Sharing
	if a.Sharing != nil {
		was = *a.Sharing
	}
	if b.Sharing != nil {
		is = *b.Sharing
	}
	return was.Session == is.Session && was.Limits == is.Limits && was.Limited == is.Limited
}

func sameLimits(a, b []record.SessionDevice) bool {
	return slices.EqualFunc(a, b, func(x, y record.SessionDevice) bool { return x.Device == y.Device && x.MemoryBytes == y.MemoryBytes })
}

func gpuName(pciAddress string) string { return device.GPUName(pciAddress) }
