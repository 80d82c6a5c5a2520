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
	"github.com/partage-dev/partage/pkg/gpu"
)

const (
	// maxRounds is how many tasks are more than any GPU needs that does not change under its claims all the time.
	maxRounds = 1000
	// surveyPatience is longer than any call keeps a GPU, undoing included.
	surveyPatience = 2 * time.Minute
	// patience is how long it is waited for a GPU of which a call takes care that is at work on it.
	patience = time.Second
)

// Survey observes a GPU and changes nothing. It waits for a GPU that a call is at work on. An error that wraps
// lock.ErrElsewhere means that another process has not let go of it for two minutes.
func (e *Engine) Survey(ctx context.Context, address string) (*Said, error) {
	r, err := e.onceOn(ctx, address, surveyPatience, func(map[string]*Said) *rules.Task { return nil })
	if err != nil {
		return nil, err
	}
	return r.said[address], nil
}

// Converge does everything that is due on a GPU, for all claims, and returns what the rules say of it then. A GPU that a
// call is at work on is left to that call: nothing is returned then. An error says what has failed.
func (e *Engine) Converge(ctx context.Context, address string) (*Said, error) {
	var errs []error
	done := map[string]bool{} // what they were about may stay
	due := func(t *rules.Task) bool { return !e.isOfCall(t) && !done[taskName(t)] }
	for range maxRounds {
		r, err := e.onceOn(ctx, address, patience, func(said map[string]*Said) *rules.Task { return first(said[address], address, due) })
		if err != nil {
			if !errors.Is(err, lock.ErrBusy) {
				errs = append(errs, err)
			}
			return nil, errors.Join(errs...)
		}
		if r.task != nil {
			done[taskName(r.task)] = true
			errs = append(errs, r.err)
			continue
		}
		i := slices.IndexFunc(r.said[address].Tasks, func(t rules.Task) bool { return !isAlone(&t, address) && due(&t) })
		if i < 0 {
			return r.said[address], errors.Join(errs...)
		}
		t := &r.said[address].Tasks[i]
		done[taskName(t)] = true
		errs = append(errs, e.onceTogether(ctx, t))
	}
	return nil, errors.Join(append(errs, fmt.Errorf("GPU %s: the rules do not come to rest", address))...)
}

// isOfCall reports whether a call is there to make what its claim wants.
func (e *Engine) isOfCall(t *rules.Task) bool {
	return t.Claim != "" && (t.Aim == rules.Make || t.Aim == rules.Commit) && e.call(t.Claim) != nil
}

// onceTogether carries out a task that needs several GPUs, if all of them propose it. Where calls are at work on some it is
// left for later: what is due on one of them must not wait for another.
func (e *Engine) onceTogether(ctx context.Context, t *rules.Task) error {
	gpus := gpu.SortPCIAddresses(slices.Clone(t.With))
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	unlock, err := e.Locks.GPUs(limited, gpus)
	switch {
	case errors.Is(err, lock.ErrBusy):
		return nil
	case err != nil:
		return err
	}
	defer unlock()
	return e.once(ctx, "", gpus, nil, jointly(t.Claim, gpus)).err
}
