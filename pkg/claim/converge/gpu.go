// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/partage-dev/partage/pkg/claim/lock"
	"github.com/partage-dev/partage/pkg/claim/rules"
)

// Said is what the rules say of a GPU.
type Said struct {
	*rules.Plan
	// Unanswered is why the GPU has not answered, or nil.
	Unanswered error
}

// Survey observes a GPU and changes nothing. It waits for a GPU that a call is at work on for as long as it is told to, and
// returns nil if that is not long enough.
func (e *Engine) Survey(ctx context.Context, address string, patience time.Duration) *Said {
	r := e.tryOnce(ctx, address, patience, func(map[string]*rules.Plan) *rules.Task { return nil })
	if r == nil {
		return nil
	}
	return &Said{r.plans[address], r.unanswered[address]}
}

// maxRepeats is how often the same task is carried out: what it was about may stay.
const maxRepeats = 3

// Converge does everything that is due on a GPU, for all claims, and returns what the rules say of it then. A GPU that a
// call is at work on is left to that call: nothing is returned then. An error says what has failed.
func (e *Engine) Converge(ctx context.Context, address string) (*Said, error) {
	var errs []error
	tried, done := map[string]bool{}, map[string]int{}
	for range maxRounds {
		r := e.tryOnce(ctx, address, 0, func(plans map[string]*rules.Plan) *rules.Task {
			for i := range plans[address].Tasks {
				t := &plans[address].Tasks[i]
				if isAlone(t, address) && !tried[taskName(t)] && !e.isOfCall(t) {
					tried[taskName(t)] = true
					return complete(t)
				}
			}
			return nil
		})
		if r == nil {
			return nil, errors.Join(errs...)
		}
		if r.err != nil {
			errs = append(errs, r.err)
		}
		if r.task != nil {
			name := taskName(r.task)
			if done[name]++; r.err == nil && done[name] < maxRepeats {
				delete(tried, name) // it may be due again
			}
			continue
		}
		again, err := e.jointly(ctx, r.plans[address], tried)
		if err != nil {
			errs = append(errs, err)
		}
		if !again {
			return &Said{r.plans[address], r.unanswered[address]}, errors.Join(errs...)
		}
	}
	return nil, errors.Join(append(errs, fmt.Errorf("GPU %s: the rules do not come to rest", address))...)
}

// isOfCall reports whether a call is there to make what its claim wants.
func (e *Engine) isOfCall(t *rules.Task) bool {
	return t.Claim != "" && (t.Aim == rules.Make || t.Aim == rules.StartJointly || t.Aim == rules.Commit) && e.call(t.Claim) != nil
}

// jointly carries out the next task that needs several GPUs, and reports whether there was one.
func (e *Engine) jointly(ctx context.Context, plan *rules.Plan, tried map[string]bool) (again bool, err error) {
	for i := range plan.Tasks {
		t := &plan.Tasks[i]
		gpus := e.with(t)
		if len(gpus) == 0 || e.isOfCall(t) || isAlone(t, gpus[0]) || tried["joint "+taskName(t)] {
			continue
		}
		tried["joint "+taskName(t)] = true
		unlock, err := e.Locks.GPUs(ctx, gpus)
		if err != nil {
			return true, err
		}
		defer unlock()
		return true, e.underLocks(ctx, gpus, nil, everything, jointTask(t.Claim, gpus)).err
	}
	return false, nil
}

// tryOnce is once for a GPU that is not waited for any longer than told. It returns nil where that is not long enough.
func (e *Engine) tryOnce(ctx context.Context, address string, patience time.Duration, choose choose) *round {
	unlock, err := e.Locks.TryGPU(address)
	if unlock == nil && err == nil && patience > 0 {
		limited, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if unlock, err = e.Locks.GPUs(limited, []string{address}); errors.Is(err, lock.ErrBusy) {
			err = nil
		}
	}
	switch {
	case err != nil:
		return e.withoutLock(ctx, address, err)
	case unlock == nil:
		return nil
	}
	defer unlock()
	return e.underLocks(ctx, []string{address}, nil, everything, choose)
}

// withoutLock decides what is known of a GPU whose lock cannot be had.
func (e *Engine) withoutLock(ctx context.Context, address string, err error) *round {
	o := e.observe(ctx, address, needed, err)
	plan := rules.Decide(o.Observation)
	return &round{plans: map[string]*rules.Plan{address: &plan}, unanswered: map[string]error{address: o.err}}
}

// taskName tells the tasks of a plan apart.
func taskName(t *rules.Task) string {
	name := fmt.Sprintf("%s %d", t.Claim, t.Aim)
	for _, a := range slices.Concat(t.Actions, t.Final) {
		name += fmt.Sprintf(" %d %s %s", a.Do, a.Key, a.Session)
	}
	return name
}
