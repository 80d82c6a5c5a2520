// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"context"
	"errors"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
)

// choose picks the task that is carried out, of what was decided for each GPU; nil is none.
type choose func(plans map[string]*rules.Plan) *rules.Task

// round is what came of observing GPUs once, and of the task that was chosen.
type round struct {
	// plans are what was decided first, by PCI address.
	plans map[string]*rules.Plan
	// unanswered are why GPUs have not answered, by PCI address.
	unanswered map[string]error
	// task is the one that was carried out, or nil, and err why not all of it was.
	task *rules.Task
	err  error
}

// verdict returns what became of a claim on a GPU.
func (r *round) verdict(claim types.UID, pciAddress string) (rules.Verdict, bool) {
	plan := r.plans[pciAddress]
	if plan == nil {
		return rules.Verdict{}, false
	}
	return plan.Verdict(claim)
}

// once locks GPUs, all or none, observes them, decides, and carries out one task. What the hardware refuses is observed
// again under the same locks, and the record is put right before anybody else can come to a wrong conclusion.
//
// On a GPU on which a call has not returned nothing is done: its lock cannot be had. GPUs that the claim only observes are
// neither locked nor asked.
func (e *Engine) once(ctx context.Context, claim types.UID, gpus []string, choose choose) (*round, error) {
	var locked, observed []string
	for _, address := range gpus {
		if e.onlyObserves(claim, address) {
			observed = append(observed, address)
		} else {
			locked = append(locked, address)
		}
	}
	unlock, err := e.Locks.GPUs(ctx, locked)
	if err != nil {
		return nil, err
	}
	defer unlock()
	return e.underLocks(ctx, gpus, observed, needed, choose), nil
}

// errObserved is why nothing is known of a GPU.
var errObserved = errors.New("it is only observed")

// onlyObserves reports whether nothing of a GPU is a claim's, whatever it had before, but that it may look at all of it.
func (e *Engine) onlyObserves(claim types.UID, pciAddress string) bool {
	var devices []record.Device
	if c := e.call(claim); c != nil {
		devices = c.Wanted.Devices
	}
	r, err := e.Store.Read(claim)
	if r != nil {
		devices = slices.Concat(devices, r.Devices)
	}
	return err == nil && !slices.ContainsFunc(devices, func(d record.Device) bool {
		return d.PCIAddress == pciAddress && (!d.Admin || d.Partition != nil)
	})
}

// underLocks does nothing but decide about the GPUs that are only observed.
func (e *Engine) underLocks(ctx context.Context, gpus, observed []string, d depth, choose choose) *round {
	seen, plans, unanswered := map[string]*observation{}, map[string]*rules.Plan{}, map[string]error{}
	for _, address := range gpus {
		var unasked error
		if slices.Contains(observed, address) {
			unasked = errObserved
		}
		seen[address] = e.observe(ctx, address, d, unasked)
		plan := rules.Decide(seen[address].Observation)
		plans[address], unanswered[address] = &plan, seen[address].err
	}
	r := &round{plans: plans, unanswered: unanswered}
	if r.task = choose(plans); r.task == nil {
		return r
	}
	refusal, err := e.act(ctx, *r.task, seen)
	r.err = err
	for _, address := range gpus {
		e.note(r.task.Claim, address, err)
	}
	if refusal == nil {
		return r
	}
	e.afterRefusal(ctx, refusal, r)
	return r
}

// afterRefusal decides again with what was refused, under the same lock, and puts the record right.
func (e *Engine) afterRefusal(ctx context.Context, refusal *rules.Refusal, r *round) {
	address := refusal.Action.GPU
	o := e.observe(ctx, address, needed, nil)
	o.Refused = refusal
	plan := rules.Decide(o.Observation)
	r.plans[address] = &plan
	for _, task := range plan.Tasks {
		if task.Claim == refusal.Action.Claim && task.Aim == rules.Make {
			if _, err := e.act(ctx, task, map[string]*observation{address: o}); err != nil {
				r.err = err
			}
			return
		}
	}
}

// ownTask chooses the first task of a claim that concerns one GPU alone, or else what is in its way.
func ownTask(claim types.UID, address string) choose {
	return func(plans map[string]*rules.Plan) *rules.Task {
		plan := plans[address]
		for i := range plan.Tasks {
			if t := &plan.Tasks[i]; t.Claim == claim && isAlone(t, address) {
				return complete(t)
			}
		}
		if v, found := plan.Verdict(claim); !found || v.State != rules.Waiting {
			return nil
		}
		for i := range plan.Tasks {
			if t := &plan.Tasks[i]; isAlone(t, address) && (t.Aim == rules.Release || t.Aim == rules.Repair) {
				return complete(t)
			}
		}
		return nil
	}
}

// isAlone reports whether a task concerns one GPU only.
func isAlone(t *rules.Task, address string) bool {
	return !slices.ContainsFunc(t.With, func(gpu string) bool { return gpu != address })
}

// complete appends what comes last.
func complete(t *rules.Task) *rules.Task {
	whole := *t
	whole.Actions = slices.Concat(t.Actions, t.Final)
	whole.Final = nil
	return &whole
}

// jointTask chooses what several GPUs of a claim, all that it needs, propose at once.
func jointTask(claim types.UID, gpus []string) choose {
	return func(plans map[string]*rules.Plan) *rules.Task {
		for _, address := range gpus {
			t := proposal(plans[address], claim, address)
			if t == nil {
				continue
			}
			with := t.With
			if slices.Contains(with, rules.EveryGPU) {
				with = gpus
			}
			if joined := join(plans, claim, with); joined != nil {
				return joined
			}
		}
		return nil
	}
}

// proposal returns what a GPU proposes for a claim that needs others, or nil.
func proposal(plan *rules.Plan, claim types.UID, address string) *rules.Task {
	if plan == nil {
		return nil
	}
	for i := range plan.Tasks {
		if t := &plan.Tasks[i]; t.Claim == claim && !isAlone(t, address) {
			return t
		}
	}
	return nil
}

// join makes one task of what these GPUs propose, or returns nil. They are together only if all of them have the same aim,
// and mean the same session.
func join(plans map[string]*rules.Plan, claim types.UID, gpus []string) *rules.Task {
	var joined rules.Task
	for i, address := range gpus {
		t := proposal(plans[address], claim, address)
		switch {
		case t == nil || i > 0 && (t.Aim != joined.Aim || t.Final[0].Session != joined.Final[0].Session):
			return nil
		case i == 0:
			joined = rules.Task{Claim: claim, Aim: t.Aim, With: t.With, Final: t.Final}
		}
		joined.Actions = append(joined.Actions, t.Actions...)
	}
	return complete(&joined)
}

// with returns the GPUs that a task needs, in the order in which they are locked.
func (e *Engine) with(t *rules.Task) []string {
	if slices.Contains(t.With, rules.EveryGPU) {
		return gpu.SortPCIAddresses(e.GPUs())
	}
	return gpu.SortPCIAddresses(slices.Clone(t.With))
}
