// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// part is one of a claim's on this GPU, with all that is known of it.
type part struct {
	*Part
	of *Record
	o  *Observation
}

// on returns the parts of a record on this GPU.
func (o *Observation) on(r *Record) (parts []part) {
	for i := range r.Devices {
		if r.Devices[i].PCIAddress == o.GPU {
			parts = append(parts, part{&r.Devices[i], r, o})
		}
	}
	return parts
}

// held finds parts on this GPU of which something may be there, as the records of this boot say. Those that only observe
// hold nothing.
func (o *Observation) held(is func(part) bool) (found []part) {
	for i := range o.Records {
		r := &o.Records[i]
		if r.BootID != o.Boot || r.Wanted {
			continue
		}
		for _, p := range o.on(r) {
			if p.Mark != record.Untouched && !p.Admin && is(p) {
				found = append(found, p)
			}
		}
	}
	return found
}

func (o *Observation) started(is func(part) bool) []part {
	return o.held(func(p part) bool { return p.Mark == record.Started && is(p) })
}

// record finds what the disk says of a claim, otherwise what a call wants.
func (o *Observation) record(claim types.UID) *Record {
	onDisk := find(o.Records, func(r *Record) bool { return r.Claim.UID == claim && !r.Wanted })
	return cmp.Or(onDisk, find(o.Records, func(r *Record) bool { return r.Claim.UID == claim }))
}

// leaving means that no container uses what the claim has: it is released, or the process that was preparing it has
// died. Where an earlier record of it cannot be read it may have been ready before.
func (o *Observation) leaving(r *Record) bool {
	return r.State == record.Releasing || r.State == record.Preparing && !r.Calling && o.guardOf(r.Claim.UID) == nil
}

func (o *Observation) guardOf(claim types.UID) *record.Guard {
	return find(o.Guards, func(g *record.Guard) bool { return g.Claim.UID == claim })
}

// guardBesides returns a guard of another claim, or nil.
func (o *Observation) guardBesides(claim types.UID) *record.Guard {
	return find(o.Guards, func(g *record.Guard) bool { return g.Claim.UID != claim })
}

func (o *Observation) at(place record.Place) *gpu.Instance {
	return partition.Instance(o.Hardware.MIGState, place.On(o.GPU))
}

func placeOf(i *gpu.Instance) record.Place {
	return record.Place{ProfileID: i.ProfileID, Placement: i.Placement}
}

func (o *Observation) session(id string) *Session {
	return find(o.Sessions, func(s *Session) bool { return s.ID == id })
}

func (o *Observation) spec(claim types.UID) *Spec {
	return find(o.Specs, func(s *Spec) bool { return s.Claim == claim })
}

// find returns the first element for which is returns true, or nil.
func find[T any](all []T, is func(*T) bool) *T {
	for i := range all {
		if is(&all[i]) {
			return &all[i]
		}
	}
	return nil
}

// action is one about all that a claim has on this GPU, or about what is no claim's.
func (o *Observation) action(kind ActionKind, claim types.UID) Action {
	return Action{Kind: kind, Claim: claim, GPU: o.GPU}
}

func (p part) action(kind ActionKind) Action {
	a := p.o.action(kind, p.of.Claim.UID)
	a.Key, a.Place, a.Session = p.Key(), p.Place(), p.SessionID()
	if kind == Start || kind == SetInterval {
		a.Interval = p.interval()
	}
	return a
}

// says makes a verdict whose text begins with the device.
func (p part) says(v Verdict, format string, args ...any) *Verdict {
	v.Why = "device " + p.Device + fmt.Sprintf(format, args...)
	return &v
}

// isMade means that the claim has started it, and made it: neither only observes, nor uses what somebody else made.
func (p part) isMade() bool { return p.Mark == record.Started && !p.Admin && !p.IsStatic() }

// isRefused reports whether the hardware has refused something for it since the lock was taken.
func (p part) isRefused() bool {
	return p.o.Refused != nil && p.o.Refused.Action.Claim == p.of.Claim.UID && p.o.Refused.Action.Key == p.Key()
}

// wasThere means that it is a partition that was there when the claim was prepared.
func (p part) wasThere() bool {
	return p.of.State == record.Prepared && p.Mark == record.Started && p.Partition != nil && !p.Admin
}

// isLost reports whether a partition that was there is not. What was refused a moment ago is not lost: it was about to
// be made again.
func (p part) isLost() bool { return p.wasThere() && p.o.at(p.Place()) == nil && !p.isRefused() }

// isGone is also what was lost before, or has no compute instance any more. That is made again when the kubelet asks: an
// administrator may be about to destroy the rest.
func (p part) isGone() bool {
	i := p.o.at(p.Place())
	return p.Mark == record.Lost || p.isLost() || p.wasThere() && i != nil && len(i.Compute) == 0
}

// isNamed reports whether the claim's CDI spec names what is there.
func (p part) isNamed() bool {
	i := p.o.at(p.Place())
	return p.Partition == nil ||
		i != nil && p.Partition.Made != nil && i.ID == p.Partition.Made.InstanceID && len(i.Compute) == 1 && p.Mark != record.Lost
}

// sharers are the started shares of the same device, also those of the same claim.
func (p part) sharers() []part {
	return p.o.started(func(q part) bool { return q.Part != p.Part && q.SameDevice(p.Part) })
}

// remainingSharers are those that are not leaving.
func (p part) remainingSharers() []part {
	return slices.DeleteFunc(p.sharers(), func(q part) bool { return p.o.leaving(q.of) })
}

// others are the remaining sharers of other claims.
func (p part) others() []part {
	return slices.DeleteFunc(p.remainingSharers(), func(q part) bool { return q.of.Claim.UID == p.of.Claim.UID })
}

// among returns it and the other shares of the same device.
func (p part) among(parts []part) []part {
	return slices.DeleteFunc(slices.Clone(parts), func(q part) bool { return q.Part != p.Part && !q.SameDevice(p.Part) })
}

// isTakenOver reports whether another claim has a partition in the place of this one. A process that could not read this
// record, because a later version wrote it, has seen the place empty and started there: what is in it is the other claim's.
func (p part) isTakenOver() bool {
	return p.IsMadeForClaims() && len(p.o.started(func(q part) bool {
		return q.of.Claim.UID != p.of.Claim.UID && q.Place() == p.Place() && q.Conflicts(p.Part)
	})) > 0
}

// users are the processes in its place that no record explains.
func (p part) users() string {
	if p.Partition == nil {
		return p.o.Hardware.Users
	}
	if i := p.o.at(p.Place()); i != nil {
		return p.o.Hardware.InstanceUsers[i.ID]
	}
	return ""
}

// interval is the time slice that it gets: all shares of a GPU have that of those that are prepared, or that have come
// first, and none if these have asked for none, whatever the policy says by now.
func (p part) interval() policy.Interval {
	sharers := p.remainingSharers()
	if p.of.State == record.Prepared || p.Partition != nil || len(sharers) == 0 {
		return p.Shared().Interval
	}
	prepared := slices.IndexFunc(sharers, func(q part) bool { return q.of.State == record.Prepared })
	return sharers[max(prepared, 0)].Shared().Interval
}

// intervalStands: the time slice cannot be read, so that the records say whether it was set.
func (p part) intervalStands() bool {
	isSet := func(q part) bool { return q.of.State == record.Prepared && q.Shared().Interval == p.interval() }
	return p.interval() == "" || !p.o.Hardware.IntervalLost && (p.of.State == record.Prepared || slices.ContainsFunc(p.sharers(), isSet))
}
