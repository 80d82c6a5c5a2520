// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// survey says what the GPU shows that belongs to no claim.
func (d *decision) survey() {
	clear := d.surveyInstances()
	clear = d.surveySessions() && clear
	if users := d.Hardware.Users; users.Any() && !d.used() {
		clear = false
		d.say(Statement{Reason: UsedByOthers, Text: "processes that no claim explains use the GPU: " + users.Text})
	}
	if d.Hardware.Exclusive && !d.named("") {
		clear = false
	}
	for _, g := range d.Guards {
		d.say(Statement{Claim: g.Claim, Reason: RecordUnreadable, Text: fmt.Sprintf("a claim's record that may be about this GPU cannot be read (%s): %s", g.Path, g.Remedy)})
		if !g.Released || !clear || d.record(g.Claim) != nil {
			continue
		}
		with := g.GPUs
		if len(with) == 0 {
			with = []string{EveryGPU}
		}
		d.repairs = append(d.repairs, Task{Claim: g.Claim, Aim: Unguard, With: with, Actions: d.unseen(g.Claim),
			Final: []Action{{Do: DropGuard, Claim: g.Claim, GPU: d.GPU}}})
	}
}

// unseen takes back what a claim may have left that cannot be seen, when its record is about to go: a time slice. MIG mode
// leaves a GPU none.
func (d *decision) unseen(claim types.UID) []Action {
	if d.Hardware.MIG || d.anyStarted(func(_ *Record, p *Part) bool { return p.Interval != "" }) {
		return nil
	}
	return []Action{{Do: ResetInterval, Claim: claim, GPU: d.GPU}}
}

// surveyInstances reports whether every instance has a record.
func (d *decision) surveyInstances() (clear bool) {
	clear = true
	for k := range d.Hardware.Instances {
		i := &d.Hardware.Instances[k]
		if d.explained(i, Partition) {
			continue
		}
		taken := d.explained(i, Static)
		clear = clear && taken
		if i.Compute == 1 && i.Whole && i.UUID != "" && (taken || len(d.Guards) == 0) {
			d.plan.Static = append(d.plan.Static, StaticPartition{Place: i.Place, UUID: i.UUID})
			continue
		}
		d.say(Statement{Place: i.Place, Reason: Occupied, Text: fmt.Sprintf("GPU instance %d (profile %d, placement %d:%d) has no record and is left alone: %s",
			i.ID, i.Place.ProfileID, i.Place.Start, i.Place.Size, d.advice(i))})
	}
	d.surveyGone()
	return clear
}

// surveyGone finds the partitions of others that claims have and that do not exist any more.
func (d *decision) surveyGone() {
	for k := range d.Records {
		r := &d.Records[k]
		for _, p := range d.on(r) {
			if r.Boot == d.Boot && p.Kind == Static && !p.Admin && p.Mark != Untouched && d.at(p.Place) == nil {
				d.plan.Static = append(d.plan.Static, StaticPartition{Place: p.Place, UUID: p.UUID, Gone: true})
			}
		}
	}
}

// advice says why an instance without record is not a device, and what helps.
func (d *decision) advice(i *Instance) string {
	switch {
	case len(d.Guards) > 0:
		g := d.Guards[0]
		return fmt.Sprintf("it may be that of a claim whose record cannot be read (%s): %s", g.Path, g.Remedy)
	case i.Compute == 0:
		return "somebody else, or a driver that was killed, made it and it has no compute instance. " +
			"Remove it with nvidia-smi mig -dgi, or give it a compute instance with nvidia-smi mig -cci"
	case i.Compute > 1:
		return fmt.Sprintf("it is divided into %d compute instances, which cannot be allocated", i.Compute)
	case !i.Whole:
		return "its compute instance has only a part of its slices, which cannot be allocated as a partition. " +
			"Remove both with nvidia-smi mig -dci and -dgi, or give it the whole instance"
	}
	return "its MIG device has no UUID"
}

// surveySessions ends the sessions that no record names, and reports whether there are none.
func (d *decision) surveySessions() (clear bool) {
	clear = true
	for _, s := range d.Sessions {
		if d.named(s.ID) {
			continue
		}
		if g := d.guardedFrom(""); g != nil {
			clear = false
			d.say(Statement{Reason: ReleasePending, Device: s.ID, Text: fmt.Sprintf("MPS session %s may be that of a claim whose record cannot be read (%s): %s", s.ID, g.Path, g.Remedy)})
			continue
		}
		// The modes come first: nothing says that they were the session's once it is gone.
		stop := Task{Aim: Repair, With: s.GPUs, Final: []Action{{Do: StopSession, GPU: d.GPU, Session: s.ID}}}
		if d.Hardware.Exclusive && !d.named("") {
			stop.Actions = []Action{{Do: SetDefault, GPU: d.GPU, Session: s.ID}}
		}
		d.repairs = append(d.repairs, stop)
	}
	return clear
}

func (d *decision) guardHint() string {
	if len(d.Guards) == 0 {
		return ""
	}
	return fmt.Sprintf("; it may be that of a claim whose record cannot be read (%s)", d.Guards[0].Path)
}

// explained reports whether a claim has the instance as a device of this kind.
func (d *decision) explained(i *Instance, kind Kind) bool {
	return d.anyStarted(func(_ *Record, p *Part) bool { return p.Place == i.Place && p.Kind == kind })
}

// named reports whether a record names the session, or any.
func (d *decision) named(id string) bool {
	return d.anyStarted(func(_ *Record, p *Part) bool { return p.Session != "" && (id == "" || p.Session == id) })
}

// used reports whether a claim that is prepared has the undivided GPU.
func (d *decision) used() bool {
	return d.anyStarted(func(r *Record, p *Part) bool { return r.Phase == Prepared && p.Place == Undivided })
}

// anyStarted finds a started part of this boot, without those that only observe.
func (d *decision) anyStarted(is func(*Record, *Part) bool) bool {
	return slices.ContainsFunc(d.Records, func(r Record) bool {
		return r.Boot == d.Boot && r.Phase != Wanted && slices.ContainsFunc(d.on(&r), func(p *Part) bool {
			return p.Mark == Started && !p.Admin && is(&r, p)
		})
	})
}
