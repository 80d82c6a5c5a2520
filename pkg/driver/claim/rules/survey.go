// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
)

// UsersOf says who uses what a claim alone has on the GPU, or nothing. Those on a device of which other claims have shares may be
// theirs, and those on what it only observes anybody's.
func (o *Observation) UsersOf(claim types.UID) (users string, own bool) {
	for _, p := range o.held(func(p part) bool { return p.of.Claim.UID == claim && len(p.others()) == 0 }) {
		if own = true; users == "" && p.users() != "" {
			users = p.Device + ": " + p.users()
		}
	}
	return users, own
}

// survey says what the GPU shows that belongs to no claim.
func (d *decision) survey() {
	instances, sessions := d.surveyInstances(), d.surveySessions()
	clear := instances && sessions
	isUsed := func(p part) bool { return p.of.State == record.Prepared && p.Partition == nil }
	switch users, opened := d.Hardware.Users, d.Hardware.Opened; {
	case len(d.started(isUsed)) > 0:
	case users != "":
		clear = false
		d.say(Statement{Reason: UsedByOthers, Text: "GPU " + d.GPU + ": processes that no claim explains use it: " + users})
	case opened != "":
		d.say(Statement{Reason: OpenedByOthers, Text: "GPU " + d.GPU + ": processes without a claim have had its device node open for ten minutes, " +
			"and nothing else of it, and keep it back no longer: " + opened})
	}
	for i := range d.Guards {
		g := &d.Guards[i]
		d.say(Statement{Claim: g.Claim, Reason: RecordUnreadable, Text: "this GPU may be used by " + g.String()})
		if r := d.record(g.Claim.UID); !g.Released || !clear || r != nil && r.BootID == d.Boot {
			continue
		}
		t := Task{Claim: g.Claim.UID, Aim: Unguard, Actions: []Action{d.action(ClearGuard, g.Claim.UID)}}
		// A time slice cannot be observed, so it is reset first. A GPU in MIG mode has none.
		if !d.Hardware.Enabled && len(d.started(func(p part) bool { return p.Shared().Interval != "" })) == 0 {
			t.Actions = append([]Action{d.action(ResetInterval, g.Claim.UID)}, t.Actions...)
		}
		d.plan.Tasks = append(d.plan.Tasks, t)
	}
}

// surveyInstances reports whether every instance has a record.
func (d *decision) surveyInstances() (clear bool) {
	clear = true
	for _, i := range d.Hardware.Instances {
		place := placeOf(&i)
		has := func(is func(part) bool) bool {
			return len(d.started(func(p part) bool { return p.Place() == place && is(p) })) > 0
		}
		taken := has(func(p part) bool { return p.IsStatic() })
		switch {
		case has(func(p part) bool { return p.IsMadeForClaims() }):
			continue
		case d.isComplete(&i) && (taken || len(d.Guards) == 0):
			d.plan.Static = append(d.plan.Static, device.Static{PCIAddress: d.GPU, ProfileID: i.ProfileID, Placement: i.Placement, UUID: i.Compute[0].UUID})
			if users := d.Hardware.InstanceUsers[i.ID]; users != "" && !taken {
				d.say(Statement{Place: place, Reason: UsedByOthers, Text: "GPU " + d.GPU + ": processes that no claim explains use the partition: " + users})
			}
		default:
			d.say(Statement{Place: place, Reason: Occupied, Text: fmt.Sprintf("GPU %s: GPU instance %d (profile %d, placement %d:%d) has no record and is left alone: %s",
				d.GPU, i.ID, i.ProfileID, i.Placement.Start, i.Placement.Size, d.advice(&i))})
		}
		clear = clear && taken
	}
	// The partitions of others that claims have and that do not exist any more, or not yet again.
	for _, p := range d.held(func(p part) bool { return p.IsStatic() && !d.isComplete(d.at(p.Place())) }) {
		d.plan.Static = append(d.plan.Static, device.Static{PCIAddress: d.GPU, ProfileID: p.Partition.ProfileID, Placement: p.Partition.Placement, UUID: p.Partition.UUID(), Gone: true})
	}
	return clear
}

// isComplete reports whether there is an instance that can be allocated.
func (d *decision) isComplete(i *gpu.Instance) bool {
	return i != nil && len(i.Compute) == 1 && d.isSpanned(i) && i.Compute[0].UUID != ""
}

// isSpanned reports whether the only compute instance spans the whole. Where the hardware does not say how many slices it has, or
// its profile has, it is taken to do so.
func (d *decision) isSpanned(i *gpu.Instance) bool {
	isLarger := func(p *gpu.Profile) bool { return p.ID == i.ProfileID && p.Slices > i.Compute[0].Slices }
	return i.Compute[0].Slices == 0 || find(d.Hardware.Profiles, isLarger) == nil
}

// advice says why an instance without record is not a device, and what helps.
func (d *decision) advice(i *gpu.Instance) string {
	switch {
	case len(d.Guards) > 0:
		return "it may be that of " + d.Guards[0].String()
	case len(i.Compute) == 0:
		return "somebody else, or a driver that was killed, made it and it has no compute instance. " +
			"Remove it with nvidia-smi mig -dgi, or give it a compute instance with nvidia-smi mig -cci"
	case len(i.Compute) > 1:
		return fmt.Sprintf("it is divided into %d compute instances, which cannot be allocated", len(i.Compute))
	case !d.isSpanned(i):
		return "its compute instance has only a part of its slices, which cannot be allocated as a partition. " +
			"Remove both with nvidia-smi mig -dci and -dgi, or give it the whole instance"
	}
	return "its MIG device has no UUID"
}

// surveySessions ends the sessions that no record names, and reports whether nothing of them is left that has to stay. It
// also says which of the others are not well, and whether there can be any.
func (d *decision) surveySessions() (clear bool) {
	hasSession := func(p part) bool { return p.SessionID() != "" }
	stray := d.Hardware.Exclusive && len(d.started(hasSession)) == 0 // a compute mode that no record explains
	clear = !stray && !d.Hardware.ModeUnknown && (d.Unsupervised == nil || !d.Shareable)
	if d.Unsupervised != nil {
		d.say(Statement{Reason: Unsupervised, Text: d.Unsupervised.Error()})
	}
	for _, s := range d.Sessions {
		if parts := d.started(func(p part) bool { return p.SessionID() == s.ID }); len(parts) > 0 {
			if s.Unwell != "" {
				d.say(Statement{Place: parts[0].Place(), Reason: SessionUnwell, Text: s.Unwell})
			}
			continue
		}
		clear = clear && len(d.Guards) == 0
		if g := find(d.Guards, func(g *record.Guard) bool { return !g.Released }); g != nil {
			d.say(Statement{Reason: ReleasePending, Device: s.ID, Text: fmt.Sprintf("MPS session %s may be that of %s", s.ID, g.String())})
			continue
		}
		// The modes come first: nothing says that they were the session's once it is gone.
		stop := Task{Aim: Repair, With: s.GPUs, Final: []Action{{Kind: StopSession, GPU: d.GPU, Session: s.ID}}}
		if stray {
			stop.Actions = []Action{{Kind: SetDefault, GPU: d.GPU, Session: s.ID}}
		}
		d.plan.Tasks = append(d.plan.Tasks, stop)
	}
	return clear
}
