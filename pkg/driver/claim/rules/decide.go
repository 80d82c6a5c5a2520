// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package rules decides what happens to the claims on one GPU.
//
//	observe   an Observation: the records that want or had something on the GPU, its hardware, the CDI specs
//	decide    Decide(Observation) -> tasks, statements, and verdicts about claims that do not get on
//	act       carries out one task under the lock of the GPU, then it is observed again
//
// Prepare, Unprepare, reconciliation and the recovery after a crash are the same loop. The rules have no effects and
// no memory; package model explores them together with a world that goes wrong.
package rules

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
)

// Decide says what to do next for each claim on one GPU, and what is wrong with it. It has no effects and no memory.
func Decide(o Observation) Plan {
	d := &decision{Observation: o}
	if d.undoRefused() {
		return d.plan
	}
	for _, s := range d.Specs {
		// A container is started with a spec of this boot only, unless its record cannot be read.
		if r := d.record(s.Claim); (r == nil || r.BootID != d.Boot || r.Wanted) && d.guardOf(s.Claim) == nil {
			d.plan.Tasks = append(d.plan.Tasks, Task{Claim: s.Claim, Aim: Repair, Actions: []Action{d.action(RemoveSpec, s.Claim)}})
		}
	}
	if err := d.Hardware.Err; err != nil {
		d.say(Statement{Reason: Unresponsive, Text: err.Error()})
	}
	for i := range d.Records {
		d.claim(&d.Records[i]).judge()
	}
	if d.Hardware.Err == nil {
		d.survey()
	}
	slices.SortStableFunc(d.plan.Tasks, func(a, b Task) int { return cmp.Compare(a.Aim, b.Aim) })
	return d.plan
}

// Needs says what has to be observed of the GPU because of what the records say.
func (o *Observation) Needs() (n Needs) {
	for i := range o.Records {
		r := &o.Records[i]
		for _, p := range o.on(r) {
			if p.Admin {
				continue
			}
			undivided := p.Partition == nil
			n.Sessions = n.Sessions || p.SessionID() != ""
			n.Mode = n.Mode || p.SessionID() != "" && undivided
			n.Fabric = n.Fabric || undivided && p.Divisible && r.State == record.Preparing
			n.Users = n.Users || (undivided || p.IsStatic()) && r.State != record.Prepared
		}
	}
	if slices.ContainsFunc(o.Guards, func(g record.Guard) bool { return g.Released }) {
		n.Mode, n.Users, n.Sessions = true, true, true // whether anything is left that it could be about
	}
	return n
}

// decision is the plan of an observation, while it is made.
type decision struct {
	Observation
	plan Plan
}

func (d *decision) say(s Statement) { d.plan.Statements = append(d.plan.Statements, s) }

// claim is a record that is judged on this GPU.
type claim struct {
	*decision
	*Record
	parts []part
}

func (d *decision) claim(r *Record) *claim { return &claim{decision: d, Record: r, parts: d.on(r)} }

func (c *claim) verdict(v Verdict) {
	v.Claim = c.Claim.UID
	c.plan.Verdicts = append(c.plan.Verdicts, v)
}

// task adds a task for the claim to the plan.
func (c *claim) task(t Task) {
	t.Claim = c.Claim.UID
	c.plan.Tasks = append(c.plan.Tasks, t)
}

// undoRefused takes back what the record says after the hardware has refused to make the instance: the place was empty a
// moment ago, so that whatever is there was made by somebody else. It comes before all other rules, whatever has become
// of the claim or the GPU since. It returns false where there is no such record.
func (d *decision) undoRefused() bool {
	refused := d.started(part.isRefused)
	if len(refused) == 0 || d.Refused.Action.Kind != CreateGI {
		return false
	}
	p := refused[0]
	var actions []Action
	for _, q := range append(p.sharers(), p) {
		// A prepared claim has lost it, and so has one whose earlier record cannot be read: what is in the place now would be
		// taken for what that record was about.
		switch isPrepared := q.of.State == record.Prepared; {
		case isPrepared && q.of != p.of:
		case isPrepared || d.guardOf(q.of.Claim.UID) != nil:
			actions = append(actions, q.action(MarkLost))
		default:
			actions = append(actions, q.action(Unstart))
		}
	}
	// It is tried again when nobody uses the GPU any more, and would need the mode again.
	if d.Hardware.Enabled && p.DynamicMIG && !errors.Is(d.Refused.Err, gpu.ErrInUse) && d.emptiedBy(nil) {
		actions = append(actions, p.action(DisableMIG))
	}
	c := d.claim(p.of)
	c.verdict(d.Refused.verdict())
	c.task(Task{Aim: Make, Actions: actions})
	return true
}

func (r *Refusal) verdict() Verdict {
	v := Verdict{State: Refused, Cause: r.Err, Why: r.Err.Error()}
	if errors.Is(r.Err, gpu.ErrInUse) {
		v.State = Waiting
	}
	return v
}

// emptiedBy reports whether these actions leave no instance.
func (o *Observation) emptiedBy(actions []Action) bool {
	return !slices.ContainsFunc(o.Hardware.Instances, func(i gpu.Instance) bool {
		return !slices.ContainsFunc(actions, func(a Action) bool { return a.Kind == DestroyGI && a.Place == placeOf(&i) })
	})
}

func (c *claim) judge() {
	if c.News {
		// Before a session that is gone is started again, and whatever has become of the GPU.
		c.task(Task{Aim: Repair, Actions: []Action{c.action(NoteSessions, c.Claim.UID)}})
	}
	switch {
	case c.BootID != c.Boot:
		// Nothing that it is about exists. The kubelet has the claim prepared again before it starts a container, or releases it.
		if c.State != record.Prepared {
			c.giveBack(c.action(Clear, c.Claim.UID))
		}
		return
	case c.Hardware.Err != nil && !c.onlyObserves():
		c.unknown()
		return
	}
	c.repair()
	switch {
	case c.leaving(c.Record):
		c.release()
	case slices.ContainsFunc(c.parts, part.isLost), !c.Calling && slices.ContainsFunc(c.parts, part.isGone):
		c.gone()
	case c.State == record.Preparing && !c.Calling:
		c.verdict(Verdict{State: Pending, Cause: ErrGuarded,
			Why: "an earlier record of the claim cannot be read; what it has stays until the kubelet prepares or releases it"})
	default:
		c.make()
	}
}

// onlyObserves: nothing has to be known of a GPU to prepare, or release, a claim that does nothing but observe it.
func (c *claim) onlyObserves() bool {
	return c.OnlyObserves(c.GPU) && (c.Calling || c.leaving(c.Record))
}

// unknown keeps everything as it is. What needs no hardware goes on, so that pods can end.
func (c *claim) unknown() {
	v := Verdict{State: Pending, Cause: c.Hardware.Err, Why: c.Hardware.Err.Error()}
	if c.leaving(c.Record) {
		const why = "this waits until the GPU answers"
		c.giveBack()
		c.sayPending(why)
		v.Why = why + ": " + v.Why
	}
	c.verdict(v)
}

// repair removes a spec that names what is not there. That a partition was seen absent is written down at the same time:
// whatever is made there later is not the claim's.
func (c *claim) repair() {
	actions := []Action{c.action(RemoveSpec, c.Claim.UID)}
	stale := slices.ContainsFunc(c.parts, func(p part) bool { return p.Partition != nil && p.Partition.Made != nil && !p.isNamed() })
	for _, p := range c.parts {
		if p.isLost() {
			actions = append(actions, p.action(MarkLost))
		}
	}
	if len(actions) > 1 || stale && c.spec(c.Claim.UID) != nil {
		c.task(Task{Aim: Repair, Actions: actions})
	}
}

func (c *claim) gone() {
	for _, p := range c.parts {
		if p.isGone() {
			c.say(Statement{Place: p.Place(), Claim: c.Claim, Device: p.Device, Reason: PartitionGone, Text: fmt.Sprintf("the partition of device %s was removed "+
				"by somebody else, or by a reset of the GPU. Containers cannot use it any more: delete the pods of the claim.", p.Device)})
		}
	}
}
