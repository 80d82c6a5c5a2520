// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/mps"
)

// observeRecords reads what the disk says of claims on the GPU, and what calls of this process want there. A call takes the
// place of a record of an earlier boot, and comes besides one that is being released.
func (e *Engine) observeRecords(pciAddress string) *observation {
	o := &observation{engine: e, snapshot: e.Store.Snapshot(), calls: map[types.UID]*Call{}, sessions: map[string]mps.Status{}}
	o.GPU, o.Boot = pciAddress, e.Store.Boot()
	wanted := map[*Call]bool{}
	e.calls.Range(func(_, c any) bool {
		call, _ := c.(*Call)
		o.calls[call.Wanted.Claim.UID], wanted[call] = call, hasGPU(call.Wanted, pciAddress)
		return true
	})
	for _, r := range o.snapshot.All() {
		call := o.calls[r.Claim.UID]
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
	for call, here := range wanted {
		if one := convert(call.Wanted, call); here {
			one.Calling = true
			o.Records = append(o.Records, one)
		}
	}
	return o
}

// recorded is what the disk says of a claim.
func (o *observation) recorded(r *record.Record, call *Call) rules.Record {
	one := convert(r, call)
	switch r.State {
	case record.Preparing:
		// Another process's Prepare may be at work.
		one.Phase, one.Calling = rules.Preparing, call != nil || o.engine.Locks.ClaimElsewhere(r.Claim.UID)
	case record.Prepared:
		one.Phase, one.Calling = rules.Prepared, call != nil
		one.Outdated = call != nil && call.Wanted.Arrived > r.Arrived
	default:
		one.Phase = rules.Releasing
	}
	return one
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
		if wanted := call.Wanted.Device(p.Key); wanted != nil {
			p.Clients = wanted.Clients
		}
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
		Priority: d.Sharing.ClientPriority, OnClientKilled: d.Sharing.OnClientKilled,
	}
	return p
}

// wishOf is what a claim wants, or has, by device and by session, as far as the claim decides about it: a record is about what
// is wanted where both are the same. What the policy decides is as it was when the record was made.
func wishOf(r *record.Record) (wish []string) {
	for i := range r.Devices {
		d, at := &r.Devices[i], partition.Address{}
		if d.Partition != nil {
			at = d.Address()
		}
		shared := d.Shared()
		wish = append(wish, fmt.Sprintf("device %s %s %t %s %s %s %+v %t",
			d.Key(), d.Type, d.Admin, d.PCIAddress, at, shared.Session, shared.Limits, shared.Limited))
	}
	for _, s := range r.Sessions {
		for _, d := range s.Devices {
			wish = append(wish, fmt.Sprintf("session %s %s %t %t %d %d", s.ID, d.Device, s.Shared, s.MultiUser, s.Percent, d.MemoryBytes))
		}
	}
	slices.Sort(wish)
	return wish
}
