// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
)

// Decision is what the rules decide about a GPU.
type Decision struct {
	rules.Plan
	// Unanswered is why the GPU has not answered, or nil.
	Unanswered error
	// Failed has the errors of the tasks that were carried out, by claim.
	Failed map[types.UID]error
}

func decide(o *observation) *Decision {
	return &Decision{Plan: rules.Decide(o.Observation), Unanswered: o.Hardware.Err}
}

// round is the result of observing GPUs once, and of the task that was chosen.
type round struct {
	// decisions are by PCI address, as they were before the task was carried out.
	decisions map[string]*Decision
	// task is the one that was carried out, or left to a call that works on its claim, or nil. err is why not all of it was
	// carried out.
	task *rules.Task
	err  error
}

// choose picks the task that is carried out, or returns nil for none.
type choose func(decisions map[string]*Decision) *rules.Task

// runRound observes GPUs, whose locks the caller has, decides, and carries out one task: for one claim, or, if of is nil, for all
// claims, which needs more observations. After the hardware has refused something, the GPU is observed again under the same locks, and
// the record is corrected before anybody else reads it. GPUs to which the claim has only admin access are not asked.
func (e *Engine) runRound(ctx context.Context, of *record.Record, gpus []string, pick choose) *round {
	r, seen := &round{decisions: map[string]*Decision{}}, map[string]*observation{}
	for _, address := range gpus {
		var why error
		if of != nil && of.OnlyObserves(address) {
			why = errUnasked
		}
		seen[address] = e.observe(ctx, address, of, why)
		r.decisions[address] = decide(seen[address])
	}
	if r.task = pick(r.decisions); r.task == nil {
		return r
	}
	if of == nil || r.task.Claim != of.Claim.UID {
		unlock := e.lockOther(r.task, seen[r.task.Actions[0].GPU])
		if unlock == nil {
			return r
		}
		defer unlock()
	}
	refusal, err := e.act(ctx, *r.task, seen)
	r.err = err
	if refusal != nil {
		e.afterRefusal(ctx, refusal, r)
	}
	return r
}

// lockOther locks the claim of a task where the GPU's lock is not enough: where the claim has only admin access to the GPU, or a CDI spec
// and no record, so that a call may be preparing it on another GPU. It returns nil if a call works on the claim, or has changed it
// since it was observed.
func (e *Engine) lockOther(t *rules.Task, seen *observation) (unlock func()) {
	was := seen.snapshot.Of(t.Claim)
	switch {
	case was == nil && t.Actions[0].Kind == rules.RemoveSpec:
	case was != nil && t.Aim == rules.Release && was.OnlyObserves(seen.GPU):
	default:
		return func() {}
	}
	unlock, err := e.Locks.TryClaim(t.Claim)
	if err != nil {
		return nil
	}
	r, err := e.Store.Read(t.Claim)
	if err != nil || (r == nil) != (was == nil) || r != nil && (r.State != was.State || r.Arrived != was.Arrived) {
		unlock()
		return nil
	}
	return unlock
}

// afterRefusal decides again with what was refused.
func (e *Engine) afterRefusal(ctx context.Context, refusal *rules.Refusal, r *round) {
	address := refusal.Action.GPU
	o := e.observe(ctx, address, &record.Record{}, nil)
	o.Refused = refusal
	r.decisions[address] = decide(o)
	for _, task := range r.decisions[address].Tasks {
		if task.Claim == refusal.Action.Claim && task.Aim == rules.Make {
			if _, err := e.act(ctx, task, map[string]*observation{address: o}); err != nil {
				r.err = err
			}
			return
		}
	}
}

// runRoundFor is runRound for a claim, with the locks of all its GPUs. If a call to the hardware of one of them has not
// returned, its lock cannot be had, and nothing is done. GPUs with admin access only are neither locked nor asked.
func (e *Engine) runRoundFor(ctx context.Context, of *record.Record, gpus []string, pick choose) (*round, error) {
	locked := slices.DeleteFunc(slices.Clone(gpus), of.OnlyObserves)
	unlock, err := e.Locks.GPUs(ctx, locked)
	if err != nil {
		return nil, err
	}
	defer unlock()
	return e.runRound(ctx, of, gpus, pick), nil
}

// errUnasked is why a GPU was not observed.
var errUnasked = errors.New("the claim only observes it")

// runRoundOn is runRound for one GPU and all claims. If the lock cannot be had because a call to the hardware has not returned, the rules
// decide with what is known without the GPU.
func (e *Engine) runRoundOn(ctx context.Context, address string, pick choose) (*round, error) {
	_, _ = e.sessions(ctx) // a supervisor that does not answer is waited for here, and not with the lock
	limited, cancel := context.WithTimeout(ctx, lockTime)
	defer cancel()
	unlock, err := e.Locks.GPUs(limited, []string{address})
	switch {
	case errors.Is(err, lock.ErrBusy), err != nil && ctx.Err() != nil:
		return nil, err
	case err != nil:
		return &round{decisions: map[string]*Decision{address: decide(e.observe(ctx, address, &record.Record{}, err))}}, nil
	}
	defer unlock()
	return e.runRound(ctx, nil, []string{address}, pick), nil
}

// first returns the first matching task that concerns this GPU alone, or nil.
func first(decision *Decision, address string, is func(*rules.Task) bool) *rules.Task {
	for i := range decision.Tasks {
		if t := &decision.Tasks[i]; isAlone(t, address) && is(t) {
			whole := *t
			whole.Actions, whole.Final = slices.Concat(t.Actions, t.Final), nil
			return &whole
		}
	}
	return nil
}

// isAlone reports whether a task concerns one GPU only.
func isAlone(t *rules.Task, address string) bool {
	return !slices.ContainsFunc(t.With, func(gpu string) bool { return gpu != address })
}

// jointly chooses a task that all GPUs which a claim needs have to propose.
func jointly(claim types.UID, gpus []string) choose {
	return func(decisions map[string]*Decision) *rules.Task {
		for _, address := range gpus {
			if t := decisions[address].proposal(claim, address); t != nil {
				if joined := join(decisions, claim, t.With); joined != nil {
					return joined
				}
			}
		}
		return nil
	}
}

// proposal returns what a GPU proposes for a claim that needs others, or nil.
func (d *Decision) proposal(claim types.UID, address string) *rules.Task {
	for i := range d.Tasks {
		if t := &d.Tasks[i]; t.Claim == claim && !isAlone(t, address) {
			return t
		}
	}
	return nil
}

// join makes one task of those that these GPUs propose, or returns nil: all of them must have the same aim, and be about the
// same MPS session. A GPU on which a prepared claim is complete has nothing to propose, and agrees that the claim is written
// again.
func join(decisions map[string]*Decision, claim types.UID, gpus []string) *rules.Task {
	var joined *rules.Task
	written := false
	for _, address := range gpus {
		d := cmp.Or(decisions[address], &Decision{}) // it may not be one of those that were observed
		t := d.proposal(claim, address)
		switch {
		case t == nil && d.isComplete(claim):
			written = true
		case t == nil && d.isLeftOut(claim):
		case t == nil || joined != nil && (t.Aim != joined.Aim || t.Final[0].Session != joined.Final[0].Session):
			return nil
		case joined == nil:
			joined = &rules.Task{Claim: claim, Aim: t.Aim, With: t.With, Actions: slices.Clone(t.Actions), Final: t.Final}
		default:
			joined.Actions = append(joined.Actions, t.Actions...)
		}
	}
	if joined == nil || written && joined.Aim != rules.Commit {
		return nil
	}
	joined.Actions, joined.Final = append(joined.Actions, joined.Final...), nil
	return joined
}

// isLeftOut reports whether a session that belongs to no claim any more can end without this GPU, which is lost.
func (d *Decision) isLeftOut(claim types.UID) bool {
	return claim == "" && (errors.Is(d.Unanswered, gpu.ErrLost) || errors.Is(d.Unanswered, gpu.ErrNotFound))
}

func (d *Decision) isComplete(claim types.UID) bool {
	v, _ := d.Verdict(claim)
	return v.State == rules.Complete
}

// taskName identifies a task of a plan, whether or not its Final actions were already joined to the others.
func taskName(t *rules.Task) string {
	return fmt.Sprintf("%s %d %+v", t.Claim, t.Aim, slices.Concat(t.Actions, t.Final))
}
