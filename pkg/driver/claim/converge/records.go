// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/mps"
)

// observeRecords reads the records of claims on the GPU, and what calls of this process want there. A call replaces a record of an
// earlier boot. A record that is being released counts in addition to its claim's call.
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
		o.Records = append(o.Records, o.recorded(r, call))
		if r.State != record.Releasing {
			delete(wanted, call)
		}
	}
	for call, here := range wanted {
		if here {
			o.Records = append(o.Records, rules.Record{Record: call.Wanted, Wanted: true, Calling: true})
		}
	}
	return o
}

// recorded joins a claim's record and its call.
func (o *observation) recorded(r *record.Record, call *Call) rules.Record {
	one := rules.Record{Record: r, Calling: call != nil}
	if r.State == record.Preparing && call == nil {
		one.Calling = o.engine.Locks.ClaimElsewhere(r.Claim.UID) // another process's Prepare may be at work
	}
	if call == nil {
		return one
	}
	one.Outdated = call.Wanted.Arrived > r.Arrived
	for i := range r.Devices {
		if wanted := call.Wanted.Device(r.Devices[i].Key()); wanted != nil {
			r.Devices[i].Clients = wanted.Clients
		}
	}
	return one
}

// wishOf describes what a claim itself asks for, by device and by session, without what the policy decides, which stays as it was
// when the record was made. A record is about the present allocation if its wish is the same.
func wishOf(r *record.Record) (wish []string) {
	for i := range r.Devices {
		d := &r.Devices[i]
		shared := d.Shared()
		wish = append(wish, fmt.Sprintf("device %s %s %t %s %+v %s %+v %t",
			d.Key(), d.Type, d.Admin, d.PCIAddress, d.Place(), shared.Session, shared.Limits, shared.Limited))
	}
	for _, s := range r.Sessions {
		for _, d := range s.Devices {
			wish = append(wish, fmt.Sprintf("session %s %s %t %t %d %d", s.ID, d.Device, s.Shared, s.MultiUser, s.Percent, d.MemoryBytes))
		}
	}
	slices.Sort(wish)
	return wish
}
