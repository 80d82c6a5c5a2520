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

// Said is what the rules say of a GPU.
type Said struct {
	rules.Plan
	// Unanswered is why the GPU has not answered, or nil.
	Unanswered error
	// Failed is what has failed just now, by claim.
	Failed map[types.UID]error
}

func decide(o *observation) *Said {
	return &Said{Plan: rules.Decide(o.Observation), Unanswered: o.Hardware.Err}
}

// round is what came of observing GPUs once, and of the task that was chosen.
type round struct {
	// said is by PCI address, before the task was carried out.
	said map[string]*Said
	// task is the one that was carried out, or left to a call that is at work with its claim, or nil. err is why not all of it
	// was carried out.
	task *rules.Task
	err  error
}

// choose picks the task that is carried out; nil is none.
type choose func(said map[string]*Said) *rules.Task

// runRound observes GPUs, whose locks the caller has, decides, and carries out one task: for a claim, or for everybody if of is nil, for
// which more is observed. What the hardware refuses is observed again under the same locks, and the record is put right before anybody
// else can come to a wrong conclusion. GPUs that the claim only observes are not asked.
func (e *Engine) runRound(ctx context.Context, of *record.Record, gpus []string, pick choose) *round {
	r, seen := &round{said: map[string]*Said{}}, map[string]*observation{}
	for _, address := range gpus {
		var why error
		if of != nil && of.OnlyObserves(address) {
			why = errUnasked
		}
		seen[address] = e.observe(ctx, address, of, why)
		r.said[address] = decide(seen[address])
	}
	if r.task = pick(r.said); r.task == nil {
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

// lockOther locks the claim of a task where the GPU's lock is not enough: where the claim only observes the GPU, or has a CDI spec
// and no record, so that it may be being prepared on another GPU. It returns nil if a call is at work with the claim, or has
// changed it since it was observed.
func (e *Engine) lockOther(t *rules.Task, seen *observation) (unlock func()) {
	was := seen.snapshot.Of(t.Claim)
	switch {
	case was == nil && t.Actions[0].Do == rules.RemoveSpec:
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
	r.said[address] = decide(o)
	for _, task := range r.said[address].Tasks {
		if task.Claim == refusal.Action.Claim && task.Aim == rules.Make {
			if _, err := e.act(ctx, task, map[string]*observation{address: o}); err != nil {
				r.err = err
			}
			return
		}
	}
}

// runRoundFor is runRound for a claim, with the locks of its GPUs, all or none. On a GPU on which a call has not
// returned nothing is done: its lock cannot be had. GPUs that the claim only observes are neither locked nor asked.
func (e *Engine) runRoundFor(ctx context.Context, of *record.Record, gpus []string, pick choose) (*round, error) {
	locked := slices.DeleteFunc(slices.Clone(gpus), of.OnlyObserves)
	unlock, err := e.Locks.GPUs(ctx, locked)
	if err != nil {
		return nil, err
	}
	defer unlock()
	return e.runRound(ctx, of, gpus, pick), nil
}

// errUnasked is why nothing is known of a GPU.
var errUnasked = errors.New("the claim only observes it")

// runRoundOn is runRound for one GPU and everybody's claims. Where the lock cannot be had, and not because somebody has it, what is
// known without it is decided: a call on the GPU has not returned.
func (e *Engine) runRoundOn(ctx context.Context, address string, pick choose) (*round, error) {
	_, _ = e.sessions(ctx) // a supervisor that does not answer is waited for here, and not with the lock
	limited, cancel := context.WithTimeout(ctx, lockTime)
	defer cancel()
	unlock, err := e.Locks.GPUs(limited, []string{address})
	switch {
	case errors.Is(err, lock.ErrBusy), err != nil && ctx.Err() != nil:
		return nil, err
	case err != nil:
		return &round{said: map[string]*Said{address: decide(e.observe(ctx, address, &record.Record{}, err))}}, nil
	}
	defer unlock()
	return e.runRound(ctx, nil, []string{address}, pick), nil
}

// first returns the first task of a GPU alone for which this holds, or nil.
func first(said *Said, address string, is func(*rules.Task) bool) *rules.Task {
	for i := range said.Tasks {
		if t := &said.Tasks[i]; isAlone(t, address) && is(t) {
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

// jointly chooses what several GPUs of a claim, all that it needs, propose at once.
func jointly(claim types.UID, gpus []string) choose {
	return func(said map[string]*Said) *rules.Task {
		for _, address := range gpus {
			if t := said[address].proposal(claim, address); t != nil {
				if joined := join(said, claim, t.With); joined != nil {
					return joined
				}
			}
		}
		return nil
	}
}

// proposal returns what a GPU proposes for a claim that needs others, or nil.
func (s *Said) proposal(claim types.UID, address string) *rules.Task {
	for i := range s.Tasks {
		if t := &s.Tasks[i]; t.Claim == claim && !isAlone(t, address) {
			return t
		}
	}
	return nil
}

// join makes one task of what these GPUs propose, or returns nil. They are together only if all of them have the same aim,
// and mean the same session. Where all of a claim that is prepared is there, a GPU has nothing to propose, and agrees that
// it is written again.
func join(said map[string]*Said, claim types.UID, gpus []string) *rules.Task {
	var joined *rules.Task
	written := false
	for _, address := range gpus {
		s := cmp.Or(said[address], &Said{}) // it may not be one of those that were observed
		t := s.proposal(claim, address)
		switch {
		case t == nil && s.isComplete(claim):
			written = true
		case t == nil && s.isLeftOut(claim):
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

// isLeftOut reports whether the GPU is lost, and a session, which is no claim's any more, ends without it.
func (s *Said) isLeftOut(claim types.UID) bool {
	return claim == "" && (errors.Is(s.Unanswered, gpu.ErrLost) || errors.Is(s.Unanswered, gpu.ErrNotFound))
}

func (s *Said) isComplete(claim types.UID) bool {
	v, _ := s.Verdict(claim)
	return v.State == rules.Complete
}

// taskName tells the tasks of a plan apart, whether or not their last actions are joined to the others.
func taskName(t *rules.Task) string {
	return fmt.Sprintf("%s %d %+v", t.Claim, t.Aim, slices.Concat(t.Actions, t.Final))
}
