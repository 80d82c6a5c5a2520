// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"fmt"
	"slices"
)

// release takes back what a claim has on this GPU, the last part first. The spec goes before everything, the record
// after it: what is cleared was seen to be gone under the same lock.
func (d *decision) release(r *Record, parts []*Part) {
	if isClear(parts) && !isClear(all(r.Parts)) {
		d.removeSpecOnly(r) // what is left of the claim is on other GPUs
		return
	}
	actions := []Action{{Do: RemoveSpec, Claim: r.Claim, GPU: d.GPU}}
	var pending string
	undone := 0
	for i, p := range slices.Backward(parts) {
		undo, waits := d.undo(r, p, parts[:i])
		if waits != "" {
			pending = waits
			continue
		}
		if p.Mark == Started && !p.Admin && p.Kind != Static {
			undone++
			actions = append(actions, undo...)
			actions = append(actions, d.action(Unstart, r, p))
		}
	}
	if pending != "" {
		// The parts that wait keep the record, and the others need not wait with them.
		if undone > 0 {
			d.releases = append(d.releases, Task{Claim: r.Claim, Aim: Release, Actions: actions})
		} else {
			d.removeSpecOnly(r)
		}
		d.verdict(r, Verdict{State: Pending, Why: pending})
		d.sayPending(r, parts, pending)
		return
	}
	d.verdict(r, Verdict{State: Working})
	d.sayPending(r, parts, "this is not done yet")
	actions = withoutMarks(r, actions)
	if d.isLastPartition(r, parts) {
		actions = append(actions, d.action(DisableMIG, r, parts[0]))
	}
	d.releases = append(d.releases, Task{Claim: r.Claim, Aim: Release, Actions: append(actions, Action{Do: Clear, Claim: r.Claim, GPU: d.GPU})})
}

// withoutMarks leaves out the marks that go with the record at the end. That a partition is gone is written down before the
// next one goes: what somebody makes in its place, if that fails, is not the claim's.
func withoutMarks(r *Record, actions []Action) (kept []Action) {
	last := 0
	for i, a := range actions {
		if a.Do != Unstart || a.Claim != r.Claim {
			last = i
		}
	}
	gone := false // a GPU instance, and nothing but marks came since
	for i, a := range actions {
		gone = a.Do == DestroyGI || gone && a.Do == Unstart
		if a.Do != Unstart || a.Claim != r.Claim || i < last && gone {
			kept = append(kept, a)
		}
	}
	return kept
}

func all(parts []Part) []*Part {
	pointers := make([]*Part, len(parts))
	for i := range parts {
		pointers[i] = &parts[i]
	}
	return pointers
}

// isClear reports whether nothing of the parts may be there.
func isClear(parts []*Part) bool {
	return !slices.ContainsFunc(parts, func(p *Part) bool { return p.Mark != Untouched })
}

// isLastPartition reports whether the release of these parts leaves no instance on a GPU whose mode follows the claims.
// Where somebody's memory keeps the first instance from being made no part is started, and the mode stays.
func (d *decision) isLastPartition(r *Record, parts []*Part) bool {
	made := slices.DeleteFunc(slices.Clone(parts), func(p *Part) bool {
		return !p.Dynamic || p.Kind != Partition || p.Admin || p.Mark != Started && p.Mark != Announced
	})
	if !d.Hardware.MIG || len(made) == 0 {
		return false
	}
	for k := range d.Hardware.Instances {
		i := &d.Hardware.Instances[k]
		goes := slices.ContainsFunc(made, func(p *Part) bool {
			return p.Mark == Started && p.Place == i.Place && i.Compute <= 1 && len(d.holders(othersOf(r.Claim, d.sharers(p)))) == 0 && !d.isTakenOver(r, p)
		})
		if !goes {
			return false
		}
	}
	return true
}

// isTakenOver reports whether another claim has a partition in the place of this one. A process that could not read this
// record, because a later version wrote it, has seen the place empty and started there: what is in it is the other claim's.
func (d *decision) isTakenOver(r *Record, p *Part) bool {
	return p.Kind == Partition && d.anyStarted(func(o *Record, q *Part) bool {
		return o.Claim != r.Claim && q.Place == p.Place && q.Conflicts(p)
	})
}

func (d *decision) sayPending(r *Record, parts []*Part, why string) {
	for _, p := range parts {
		if p.Admin || p.Kind == Static || p.Mark != Started {
			continue
		}
		d.say(Statement{Place: p.Place, Claim: r.Claim, Device: p.Device, Reason: ReleasePending,
			Text: fmt.Sprintf("device %s of claim %s is to be released, and %s", p.Device, r.Name, why)})
	}
}

func (d *decision) removeSpecOnly(r *Record) {
	if slices.ContainsFunc(d.Specs, func(s Spec) bool { return s.Claim == r.Claim }) {
		d.releases = append(d.releases, Task{Claim: r.Claim, Aim: Release, Actions: []Action{{Do: RemoveSpec, Claim: r.Claim, GPU: d.GPU}}})
	}
}

// undo lists what takes back a part, or says what that waits for. before are the claim's parts that are undone after it.
func (d *decision) undo(r *Record, p *Part, before []*Part) (actions []Action, pending string) {
	if p.Mark != Started || p.Admin || p.Kind == Static {
		return nil, ""
	}
	if slices.ContainsFunc(before, func(q *Part) bool { return q.Mark == Started && q.SameDevice(p) }) {
		return nil, "" // the first share of the claim takes everything with it
	}
	others := othersOf(r.Claim, d.sharers(p))
	if holders := d.holders(others); len(holders) > 0 {
		return d.leaveTo(r, p, holders), ""
	}
	if d.isTakenOver(r, p) {
		return nil, ""
	}
	if g := d.guardedFrom(r.Claim); p.Shared && g != nil {
		return nil, "a claim whose record cannot be read may have a share of it (" + g.Path + ")"
	}
	instance := d.at(p.Place)
	users := d.users(p.Place)
	switch {
	case users.Any():
		return nil, "it is in use: " + users.Text
	case instance != nil && instance.Compute > 1:
		return nil, "" // somebody else has divided it
	case p.Session != "" && d.Supervisor != Answered:
		return nil, "the MPS supervisor does not answer: " + d.SupervisorText
	}
	return d.undoLast(r, p, instance, others), ""
}

// undoLast lists what takes back a part that nobody else has, but others that are leaving, too.
func (d *decision) undoLast(r *Record, p *Part, instance *Instance, others []sharer) (actions []Action) {
	do := func(a Do) { actions = append(actions, d.action(a, r, p)) }
	if p.Session != "" && d.session(p.Session) != nil {
		do(StopSession)
	}
	if p.Session != "" && p.Place == Undivided && d.Hardware.Exclusive {
		do(SetDefault)
	}
	if p.Interval != "" {
		do(ResetInterval)
	}
	if p.Kind == Partition && instance != nil {
		if instance.Compute > 0 {
			do(DestroyCI)
		}
		do(DestroyGI)
	}
	for _, o := range others {
		actions = append(actions, d.action(Unstart, o.record, o.Part))
	}
	return actions
}

// leaveTo gives a share back. Of several that are released at the same time, the first one takes everything with it. That the
// limits cannot be tightened is no reason to keep a claim.
func (d *decision) leaveTo(r *Record, p *Part, others []sharer) (actions []Action) {
	if d.guardedFrom(r.Claim) != nil {
		return nil
	}
	if s := d.session(p.Session); s != nil && !p.Own && d.Supervisor == Answered {
		if want := demandOf(others); s.Demand != want {
			a := d.action(StartSession, r, p)
			a.Demand = want
			actions = append(actions, a)
		}
	}
	if p.Interval != "" && !slices.ContainsFunc(others, func(s sharer) bool { return s.Interval != "" }) {
		actions = append(actions, d.action(ResetInterval, r, p))
	}
	return actions
}

// demandOf is what lets all these shares have what they need: a server holds everybody to its limits.
func demandOf(shares []sharer) Demand {
	var all Demand
	for i, s := range shares {
		if i == 0 {
			all = s.Demand
			continue
		}
		all.Percent = larger(all.Percent, s.Demand.Percent)
		all.MemoryBytes = larger(all.MemoryBytes, s.Demand.MemoryBytes)
		all.BelowNormal = all.BelowNormal && s.Demand.BelowNormal
		all.Priorities = all.Priorities || s.Demand.Priorities
		all.Restart = all.Restart || s.Demand.Restart
	}
	return all
}

// larger returns the larger of two limits, of which zero is none.
func larger[T int | int64](a, b T) T {
	if a == 0 || b == 0 {
		return 0
	}
	return max(a, b)
}

// disown begins the release of a claim that the API server does not know, unless somebody uses it.
func (d *decision) disown(r *Record, parts []*Part) {
	for _, p := range parts {
		users := d.users(p.Place)
		if p.Admin || !users.Any() || len(d.holders(othersOf(r.Claim, d.sharers(p)))) > 0 {
			continue
		}
		d.verdict(r, Verdict{State: Pending, Code: InUse, Why: "processes use it: " + users.Text})
		d.say(Statement{Place: p.Place, Claim: r.Claim, Device: p.Device, Reason: OrphanInUse,
			Text: fmt.Sprintf("claim %s does not have its devices any more and is kept, because processes use %s: %s", r.Name, p.Device, users.Text)})
		return
	}
	d.verdict(r, Verdict{State: Working})
	d.releases = append(d.releases, Task{Claim: r.Claim, Aim: Disown, With: r.gpus(),
		Final: []Action{{Do: MarkReleasing, Claim: r.Claim, GPU: d.GPU}}})
}
