// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"context"
	"errors"
	"fmt"

	"github.com/partage-dev/partage/pkg/claim/rules"
)

// Converge does everything that is due on a GPU, for all claims, and returns what the rules say of it then. A GPU that a
// call is at work on is left to that call: busy is true then, and there is no plan. An error says what is left.
func (e *Engine) Converge(ctx context.Context, address string) (plan *rules.Plan, busy bool, err error) {
	var errs []error
	tried := map[string]bool{}
	for range maxRounds {
		r, busy, err := e.tryOnce(ctx, address, func(plans map[string]*rules.Plan) *rules.Task {
			for i := range plans[address].Tasks {
				t := &plans[address].Tasks[i]
				if isAlone(t, address) && !tried[taskName(t)] {
					tried[taskName(t)] = true
					return complete(t)
				}
			}
			return nil
		})
		if busy || err != nil {
			return nil, busy, err
		}
		if r.err != nil {
			errs = append(errs, r.err)
		}
		if r.task != nil {
			if r.err == nil {
				delete(tried, taskName(r.task)) // it may be due again
			}
			continue
		}
		again, err := e.jointly(ctx, r.plans[address], tried)
		if err != nil {
			errs = append(errs, err)
		}
		if !again {
			return r.plans[address], false, errors.Join(errs...)
		}
	}
	return nil, false, fmt.Errorf("GPU %s: the rules do not come to rest", address)
}

// jointly carries out the next task that needs several GPUs, and reports whether there was one.
func (e *Engine) jointly(ctx context.Context, plan *rules.Plan, tried map[string]bool) (again bool, err error) {
	for i := range plan.Tasks {
		t := &plan.Tasks[i]
		if len(t.With) == 0 || tried["joint "+taskName(t)] {
			continue
		}
		gpus := e.with(t)
		if len(gpus) < 2 {
			continue
		}
		tried["joint "+taskName(t)] = true
		r, err := e.once(ctx, gpus, jointTask(t.Claim, gpus))
		if err != nil {
			return true, err
		}
		return true, r.err
	}
	return false, nil
}

// tryOnce is once for a GPU that is not waited for.
func (e *Engine) tryOnce(ctx context.Context, address string, choose choose) (r *round, busy bool, err error) {
	unlock, err := e.Locks.TryGPU(address)
	switch {
	case err != nil:
		plan := rules.Decide(e.observe(ctx, address, needed, err).Observation)
		return &round{plans: map[string]*rules.Plan{address: &plan}}, false, nil
	case unlock == nil:
		return nil, true, nil
	}
	defer unlock()
	return e.underLocks(ctx, []string{address}, everything, choose), false, nil
}

// taskName tells the tasks of a plan apart.
func taskName(t *rules.Task) string {
	name := fmt.Sprintf("%s %d", t.Claim, t.Aim)
	for _, a := range t.Actions {
		name += fmt.Sprintf(" %d %s %s", a.Do, a.Key, a.Session)
	}
	return name
}
