// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
)

// release takes back what a claim has on this GPU, the last part first. The spec goes before everything, the record
// after it: what is cleared was seen to be gone under the same lock.
func (c *claim) release() {
	isHere := func(p part) bool { return p.Mark != record.Untouched }
	if !slices.ContainsFunc(c.parts, isHere) && slices.ContainsFunc(c.Devices, func(p Part) bool { return p.Mark != record.Untouched }) {
		c.giveBack() // what is left of the claim is on other GPUs
		return
	}
	var actions []Action
	var pending string
	for i, p := range slices.Backward(c.parts) {
		if !p.isMade() || slices.ContainsFunc(c.parts[:i], func(q part) bool { return q.isMade() && q.SameDevice(p.Part) }) {
			continue // the first share of the claim takes everything with it
		}
		undo, waits := p.undo()
		if waits != "" {
			pending = waits
			continue
		}
		actions = append(actions, undo...)
		for _, q := range p.among(c.parts) {
			actions = append(actions, q.action(Unstart))
		}
	}
	if pending != "" {
		// The parts that wait keep the record, and the others need not wait with them.
		c.giveBack(actions...)
		c.verdict(Verdict{State: Pending, Why: pending})
		c.sayPending(pending)
		return
	}
	c.sayPending("")
	for n := len(actions); n > 0 && actions[n-1].Kind == Unstart && actions[n-1].Claim == c.Claim.UID; n-- {
		actions = actions[:n-1] // it goes with the record
	}
	if slices.ContainsFunc(c.parts, part.needsMode) && c.emptiedBy(actions) {
		actions = append(actions, c.parts[0].action(DisableMIG))
	}
	c.giveBack(append(actions, c.action(Clear, c.Claim.UID))...)
}

// needsMode means that MIG mode is on for it. Where somebody's memory keeps the first instance from being made no part is
// started, and the mode stays.
func (p part) needsMode() bool {
	return p.o.Hardware.Enabled && p.DynamicMIG && p.IsMadeForClaims() && !p.Admin && (p.Mark == record.Started || p.Mark == record.Announced)
}

// giveBack proposes a release, if there is something to do.
func (c *claim) giveBack(actions ...Action) {
	if len(actions) > 0 || c.spec(c.Claim.UID) != nil {
		c.task(Task{Aim: Release, Actions: append([]Action{c.action(RemoveSpec, c.Claim.UID)}, actions...)})
	}
}

// sayPending says what is in the way of a release, or nothing where it is due.
func (c *claim) sayPending(why string) {
	for _, p := range c.parts {
		if p.isMade() {
			text := fmt.Sprintf("device %s of claim %s is to be released, and %s", p.Device, c.Claim, cmp.Or(why, "this is not done yet"))
			c.say(Statement{Place: p.Place(), Claim: c.Claim, Device: p.Device, Reason: ReleasePending, Text: text})
		}
	}
}

// undo lists what takes back a part, or says what that waits for.
func (p part) undo() (actions []Action, pending string) {
	others, users, instance := p.others(), p.users(), p.o.at(p.Place())
	switch g := p.o.guardBesides(p.of.Claim.UID); {
	case len(others) > 0:
		return p.leaveTo(others, g)
	case p.isTakenOver():
		return nil, ""
	case p.Type.IsShare() && g != nil:
		return nil, "it may be shared by " + g.String()
	case users != "":
		return nil, "it is in use: " + users
	case instance != nil && len(instance.Compute) > 1:
		return nil, "" // somebody else has divided it
	case p.SessionID() != "" && p.o.Unsupervised != nil:
		return nil, "the MPS supervisor does not answer: " + p.o.Unsupervised.Error()
	}
	return p.undoLast(instance), ""
}

// undoLast lists what takes back a part that nobody else has, but others that are leaving, too.
func (p part) undoLast(instance *gpu.Instance) (actions []Action) {
	do := func(kind ActionKind, due bool) {
		if due {
			actions = append(actions, p.action(kind))
		}
	}
	do(StopSession, p.o.session(p.SessionID()) != nil)
	do(SetDefault, p.SessionID() != "" && p.Partition == nil && p.o.Hardware.Exclusive)
	do(ResetInterval, anyInterval(append(p.sharers(), p)) && !p.isRefused())
	do(DestroyCI, p.IsMadeForClaims() && instance != nil && len(instance.Compute) > 0)
	do(DestroyGI, p.IsMadeForClaims() && instance != nil)
	for _, q := range p.sharers() {
		if q.of != p.of {
			actions = append(actions, q.action(Unstart))
		}
	}
	return actions
}

// anyInterval reports whether a share has a time slice.
func anyInterval(shares []part) bool {
	return slices.ContainsFunc(shares, func(p part) bool { return p.Shared().Interval != "" })
}

// leaveTo releases a share of a GPU that other claims, and perhaps one whose record cannot be read, go on using. Of several that are
// released at the same time, the first one takes everything with it. That the limits cannot be tightened is no reason to keep a claim.
func (p part) leaveTo(others []part, g *record.Guard) (actions []Action, pending string) {
	switch {
	case g != nil && p.Shared().Interval != "" && !anyInterval(others):
		return nil, "its time slice may be that of " + g.String() // nobody else would know of it
	case g != nil:
		return nil, ""
	}
	if s := p.o.session(p.SessionID()); s != nil && s.Demand != demandOf(others) {
		a := p.action(StartSession)
		a.Demand = demandOf(others)
		actions = append(actions, a)
	}
	if p.Shared().Interval != "" && !anyInterval(others) {
		actions = append(actions, p.action(ResetInterval))
	}
	return actions, ""
}
