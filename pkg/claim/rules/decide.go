// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// Decide says what to do next for each claim on one GPU, and what is wrong with it. It has no effects and no memory. The
// tasks come in the order in which they should be tried: what takes away comes before what makes.
func Decide(o Observation) Plan {
	d := &decision{Observation: o}
	if d.undoRefused() {
		return d.finish()
	}
	d.dropStaleSpecs()
	if o.Hardware.Answer != Answered {
		d.unknown()
		return d.finish()
	}
	for i := range d.Records {
		d.judge(&d.Records[i])
	}
	d.survey()
	return d.finish()
}

// NeedsOf says what has to be observed of a GPU because of what the records say.
func NeedsOf(gpu string, records []Record) Needs {
	var n Needs
	for i := range records {
		r := &records[i]
		for k := range r.Parts {
			p := &r.Parts[k]
			if p.GPU != gpu || p.Admin {
				continue
			}
			undivided := p.Place == Undivided
			n.Sessions = n.Sessions || p.Session != ""
			n.Mode = n.Mode || p.Session != "" && undivided
			n.Fabric = n.Fabric || undivided && p.Divisible && r.Phase != Prepared && r.Phase != Releasing
			n.Users = n.Users || undivided && r.Phase != Prepared || r.Orphan
		}
	}
	return n
}

// decision is one in the making.
type decision struct {
	Observation
	plan Plan
	// The tasks in the order in which they should be tried.
	repairs, releases, makes []Task
}

func (d *decision) finish() Plan {
	d.plan.Tasks = slices.Concat(d.repairs, d.releases, d.makes)
	return d.plan
}

func (d *decision) judge(r *Record) {
	parts := d.on(r)
	lost := slices.ContainsFunc(parts, func(p *Part) bool { return p.Mark == Lost })
	switch {
	case r.Boot != d.Boot:
		d.earlierBoot(r)
	case d.leaving(r):
		d.release(r, parts)
	case r.Phase == Prepared && r.Orphan && !r.Calling:
		d.disown(r, parts)
	case lost && !r.Calling:
		d.gone(r, parts)
	case r.Phase == Preparing && !r.Calling:
		d.verdict(r, Verdict{State: Pending, Code: Guarded,
			Why: "an earlier record of the claim cannot be read; what it has stays until the kubelet prepares or releases it"})
	case slices.ContainsFunc(parts, func(p *Part) bool { return d.isLost(r, p) }):
		d.lose(r, parts)
	case !r.Calling && slices.ContainsFunc(parts, func(p *Part) bool { return d.isEmptied(r, p) }):
		d.gone(r, parts)
	default:
		d.make(r, parts)
	}
}

// undoRefused takes back what the record says after the hardware has refused to make the instance: the place was empty a
// moment ago, so that whatever is there was made by somebody else. It comes before all other rules, whatever has become
// of the claim or the GPU since. It returns false where there is no such record.
func (d *decision) undoRefused() bool {
	if d.Refused == nil || d.Refused.Action.Do != CreateGI {
		return false
	}
	r := d.record(d.Refused.Action.Claim)
	if r == nil {
		return false
	}
	p := r.part(d.Refused.Action.Key)
	if p == nil || p.Mark != Started {
		return false
	}
	v := Verdict{State: Refused, Why: d.Refused.Text}
	if d.Refused.InUse {
		v = Verdict{State: Waiting, Code: InUse, Why: d.Refused.Text}
		d.say(Statement{Place: p.Place, Claim: r.Claim, Device: p.Device, Reason: UsedByOthers, Text: d.Refused.Text})
	}
	d.verdict(r, v)
	actions := []Action{d.takeBack(r, p)}
	for _, s := range d.sharers(p) {
		if s.record.Phase != Prepared || s.record == r {
			actions = append(actions, d.takeBack(s.record, s.Part))
		}
	}
	actions = append(actions, d.modeOff(r, p)...)
	d.makes = append(d.makes, Task{Claim: r.Claim, Aim: Make, Actions: actions})
	return true
}

// takeBack says that nothing is there of a part that was about to be made. A prepared claim has lost it, and so has one whose
// earlier record cannot be read: what is in the place now would be taken for what that record was about.
func (d *decision) takeBack(r *Record, p *Part) Action {
	if r.Phase == Prepared || d.guardOf(r.Claim) {
		return d.action(MarkLost, r, p)
	}
	return d.action(Unstart, r, p)
}

// dropStaleSpecs proposes to remove the specs that name what is not there.
func (d *decision) dropStaleSpecs() {
	for _, s := range d.Specs {
		r := d.record(s.Claim)
		if !d.isStale(s, r) {
			continue
		}
		actions := []Action{{Do: RemoveSpec, Claim: s.Claim, GPU: d.GPU}}
		// That it was seen absent is written down at once: whatever is made there later is not the claim's.
		if r != nil && r.Boot == d.Boot && d.Hardware.Answer == Answered {
			for _, p := range d.on(r) {
				if d.isLost(r, p) {
					actions = append(actions, d.action(MarkLost, r, p))
				}
			}
		}
		d.repairs = append(d.repairs, Task{Claim: s.Claim, Aim: Repair, Actions: actions})
	}
}

func (d *decision) isStale(s Spec, r *Record) bool {
	guarded := d.guardOf(s.Claim)
	switch {
	case r == nil:
		return !guarded
	case (r.Boot != d.Boot || r.Phase == Wanted) && !guarded:
		return true
	case d.Hardware.Answer != Answered:
		return false // it is not known what is there
	}
	for _, p := range d.on(r) {
		if p.InstanceID == NoInstance || p.Place == Undivided {
			continue
		}
		i := d.instance(p.InstanceID)
		if i == nil || i.Compute != 1 || i.Place != p.Place || p.Mark == Lost {
			return true
		}
	}
	return false
}

// unknown keeps everything as it is. What needs no hardware goes on, so that pods can end.
func (d *decision) unknown() {
	d.say(Statement{Reason: Unresponsive, Text: d.Hardware.Text})
	code := OutOfService
	if d.Hardware.Answer == Failed {
		code = Unanswered
	}
	for i := range d.Records {
		r := &d.Records[i]
		switch {
		case r.Boot != d.Boot:
			d.earlierBoot(r)
		case d.observes(r) && d.leaving(r):
			d.release(r, d.on(r))
		case d.observes(r) && r.Calling:
			d.make(r, d.on(r))
		case d.leaving(r):
			const why = "this waits until the GPU answers"
			d.removeSpecOnly(r)
			d.verdict(r, Verdict{State: Pending, Code: code, Why: why + ": " + d.Hardware.Text})
			d.sayPending(r, d.on(r), why)
		default:
			d.verdict(r, Verdict{State: Unknown, Code: code, Why: d.Hardware.Text})
		}
	}
}

// observes reports whether a claim does nothing but look at the GPU: nothing has to be known of that.
func (d *decision) observes(r *Record) bool {
	return !slices.ContainsFunc(d.on(r), func(p *Part) bool { return !p.Admin || p.Place != Undivided })
}

// earlierBoot: nothing that such a record is about exists. The kubelet has the claim prepared again before it starts a
// container, or releases it.
func (d *decision) earlierBoot(r *Record) {
	if r.Phase == Prepared && !r.Orphan {
		d.verdict(r, Verdict{State: Missing, Why: "it was prepared before the machine was started"})
		return
	}
	d.releases = append(d.releases, Task{Claim: r.Claim, Aim: Release, Actions: []Action{
		{Do: RemoveSpec, Claim: r.Claim, GPU: d.GPU}, {Do: Clear, Claim: r.Claim, GPU: d.GPU},
	}})
}

// --- what the observation shows ---

// on returns the parts of a record on this GPU.
func (d *decision) on(r *Record) []*Part {
	var parts []*Part
	for i := range r.Parts {
		if r.Parts[i].GPU == d.GPU {
			parts = append(parts, &r.Parts[i])
		}
	}
	return parts
}

func (r *Record) part(key string) *Part {
	i := slices.IndexFunc(r.Parts, func(p Part) bool { return p.Key == key })
	if i < 0 {
		return nil
	}
	return &r.Parts[i]
}

// gpus are those of the claim.
func (r *Record) gpus() []string {
	var gpus []string
	for i := range r.Parts {
		if !slices.Contains(gpus, r.Parts[i].GPU) {
			gpus = append(gpus, r.Parts[i].GPU)
		}
	}
	return gpus
}

// record finds what the disk says of a claim, otherwise what a call wants.
func (d *decision) record(claim types.UID) (found *Record) {
	for i := range d.Records {
		if r := &d.Records[i]; r.Claim == claim && (found == nil || found.Phase == Wanted) {
			found = r
		}
	}
	return found
}

// leaving means that no container uses what the claim has: it is released, or the process that was preparing it has
// died. Where an earlier record of it cannot be read it may have been ready before.
func (d *decision) leaving(r *Record) bool {
	return r.Phase == Releasing || r.Phase == Preparing && !r.Calling && !d.guardOf(r.Claim)
}

func (d *decision) guardOf(claim types.UID) bool {
	return slices.ContainsFunc(d.Guards, func(g Guard) bool { return g.Claim == claim })
}

// guardedFrom returns a guard of another claim, or nil.
func (d *decision) guardedFrom(claim types.UID) *Guard {
	i := slices.IndexFunc(d.Guards, func(g Guard) bool { return g.Claim != claim || claim == "" })
	if i < 0 {
		return nil
	}
	return &d.Guards[i]
}

func (d *decision) at(place Place) *Instance {
	i := slices.IndexFunc(d.Hardware.Instances, func(i Instance) bool { return i.Place == place })
	if i < 0 {
		return nil
	}
	return &d.Hardware.Instances[i]
}

func (d *decision) instance(id int) *Instance {
	i := slices.IndexFunc(d.Hardware.Instances, func(i Instance) bool { return i.ID == id })
	if i < 0 {
		return nil
	}
	return &d.Hardware.Instances[i]
}

func (d *decision) session(id string) *Session {
	i := slices.IndexFunc(d.Sessions, func(s Session) bool { return s.ID == id })
	if i < 0 {
		return nil
	}
	return &d.Sessions[i]
}

// sharer is a started share of the same device as another part.
type sharer struct {
	record *Record
	*Part
}

// sharers are the started shares of the same device, also those of the same claim.
func (d *decision) sharers(p *Part) (found []sharer) {
	for i := range d.Records {
		r := &d.Records[i]
		if r.Boot != d.Boot || r.Phase == Wanted {
			continue
		}
		for _, q := range d.on(r) {
			if q != p && q.Mark == Started && p.SameDevice(q) {
				found = append(found, sharer{r, q})
			}
		}
	}
	return found
}

// othersOf leaves out the shares of one claim.
func othersOf(claim types.UID, all []sharer) []sharer {
	return slices.DeleteFunc(slices.Clone(all), func(s sharer) bool { return s.record.Claim == claim })
}

// holders are the sharers that are not leaving.
func (d *decision) holders(all []sharer) []sharer {
	return slices.DeleteFunc(slices.Clone(all), func(s sharer) bool { return d.leaving(s.record) })
}

// refused reports whether the hardware has refused something for a part since the lock was taken.
func (d *decision) refused(r *Record, p *Part) bool {
	return d.Refused != nil && d.Refused.Action.Claim == r.Claim && d.Refused.Action.Key == p.Key
}

// users are the processes in a place that no record explains.
func (d *decision) users(place Place) Users {
	if place == Undivided {
		return d.Hardware.Users
	}
	if i := d.at(place); i != nil {
		return d.Hardware.InstanceUsers[i.ID]
	}
	return Users{}
}

// --- what is said ---

func (d *decision) action(do Do, r *Record, p *Part) Action {
	a := Action{Do: do, Claim: r.Claim, GPU: d.GPU, Key: p.Key, Place: p.Place}
	switch do {
	case StartSession, StopSession:
		a.Session = p.Session
	case Start, SetInterval:
		a.Interval = p.Interval
	}
	return a
}

func (d *decision) verdict(r *Record, v Verdict) {
	v.Claim = r.Claim
	d.plan.Verdicts = append(d.plan.Verdicts, v)
}

func (d *decision) say(s Statement) { d.plan.Statements = append(d.plan.Statements, s) }
