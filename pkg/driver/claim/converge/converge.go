// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/panics"
	"github.com/partage-dev/partage/pkg/util/steptime"
	"github.com/partage-dev/partage/pkg/util/wait"
)

const (
	// maxRounds bounds the loop of a Prepare, for GPUs that change all the time. No other GPU needs as many tasks.
	maxRounds = 1000
	// lockTime is longer than any call keeps a GPU, undoing included.
	lockTime = 2 * time.Minute
	// roundTime is how long Converge starts more tasks for a GPU before it returns what has come of them.
	roundTime = 5 * time.Second
	// patience is how long a task of several GPUs waits for those on which calls are at work.
	patience = time.Second
)

// Converge carries out the tasks that are due on a GPU, for all claims, and returns the last decision, or nil where a call keeps the
// GPU's lock; an error that wraps lock.ErrElsewhere means that another process does. Other errors say what has failed. If no task
// is due, nothing changes.
func (e *Engine) Converge(ctx context.Context, address string, isDue func(*rules.Task) bool) (*Decision, error) {
	var errs []error
	failed := map[types.UID]error{}
	done := map[string]bool{} // a task that leaves its cause in place would be due for ever
	until := time.Now().Add(roundTime)
	due := func(t *rules.Task) bool {
		enough := len(done) > 0 && time.Now().After(until)
		return !enough && !e.isOfCall(t) && !done[taskName(t)] && isDue(t)
	}
	for {
		r, err := e.runRoundOn(ctx, address, func(decisions map[string]*Decision) *rules.Task { return first(decisions[address], address, due) })
		if err != nil {
			if errors.Is(err, lock.ErrElsewhere) || !errors.Is(err, lock.ErrBusy) {
				errs = append(errs, err)
			}
			return nil, errors.Join(errs...)
		}
		decision, t, err := r.decisions[address], r.task, r.err
		if t == nil {
			i := slices.IndexFunc(decision.Tasks, func(t rules.Task) bool { return !isAlone(&t, address) && due(&t) })
			if i < 0 {
				decision.Failed, decision.Statements = failed, append(decision.Statements, e.stillInUse(ctx, address)...)
				return decision, errors.Join(errs...)
			}
			t, err = &decision.Tasks[i], e.onceTogether(ctx, &decision.Tasks[i])
		}
		done[taskName(t)] = true
		if !errors.Is(err, record.ErrOutOfDate) { // which means that the claim was released meanwhile, so that this does not matter
			failed[t.Claim], errs = err, append(errs, err)
		}
	}
}

// stillInUse returns a statement about what could not be made on a GPU because it is in use, until no process is on it any more.
func (e *Engine) stillInUse(ctx context.Context, address string) []rules.Statement {
	last, found := e.inUse.Load(address)
	if !found {
		return nil
	}
	if processes, err := e.Partitions.Processes(ctx, address); err == nil && len(processes) == 0 {
		e.inUse.Delete(address)
		return nil
	}
	s, _ := last.(rules.Statement)
	return []rules.Statement{s}
}

// isOfCall reports whether a task is left to the Prepare that is at work on its claim.
func (e *Engine) isOfCall(t *rules.Task) bool {
	return t.Claim != "" && (t.Aim == rules.Make || t.Aim == rules.Commit) && e.call(t.Claim) != nil
}

// onceTogether carries out a task that needs several GPUs, if all of them propose it. If calls are at work on some, it is left
// for later, so that other tasks of this GPU need not wait for them.
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
	return e.runRound(ctx, nil, gpus, jointly(t.Claim, gpus)).err
}

// Finish completes the release of a claim, or the undoing of a preparation, on these GPUs, and returns an error about what is
// left. It works on all GPUs at the same time. A Prepare that is older than the release is stopped first.
func (e *Engine) Finish(ctx context.Context, r *record.Record, gpus []string) error {
	if c := e.call(r.Claim.UID); c != nil && c.isOutOfDate() {
		c.stop()
	}
	errs := make([]error, len(gpus))
	var wg sync.WaitGroup
	for i, address := range gpus {
		wg.Go(func() { errs[i] = e.finishOn(ctx, r, address) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (e *Engine) finishOn(ctx context.Context, of *record.Record, address string) (err error) {
	defer panics.Recover(ctx, &err)
	claim := of.Claim.UID
	var failed attempts
	last := ""
	for {
		failed.begin()
		r, err := e.runRoundFor(ctx, of, []string{address}, func(decisions map[string]*Decision) *rules.Task {
			return first(decisions[address], address, func(t *rules.Task) bool { return t.Claim == claim && t.Aim == rules.Release })
		})
		if err != nil {
			return err
		}
		switch {
		case r.err != nil:
			if err := failed.retry(ctx, r.err); err != nil {
				return err
			}
		case r.task == nil || taskName(r.task) == last: // done, and due again, as with a CDI spec that cannot be removed
			return e.left(claim, r.decisions[address])
		case r.task.Actions[len(r.task.Actions)-1].Kind == rules.Clear:
			return nil // nothing is left
		default:
			last = taskName(r.task)
		}
	}
}

// left returns an error about what a released claim still has on a GPU, or why that is not known.
func (e *Engine) left(claim types.UID, decision *Decision) error {
	r, err := e.Store.Read(claim)
	if err != nil || r == nil || r.State == record.Prepared {
		return err
	}
	if v, found := decision.Verdict(claim); found && v.State == rules.Pending {
		return &v
	}
	return nil
}

// attempts are those that have failed, and when the present one began.
type attempts struct {
	failed int
	began  time.Time
}

func (n *attempts) begin() { n.began = time.Now() }

// pauses are the waits between attempts, after failures that may pass. The kubelet gives a call 45 seconds and
// tries again only after a minute.
var pauses = []time.Duration{200 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second}

// retry waits before another attempt, or returns an error if there is to be none.
func (n *attempts) retry(ctx context.Context, err error) error {
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	n.failed++
	if transient(err) && n.failed <= len(pauses) && n.hasTime(ctx, pauses[n.failed-1]) && wait.For(ctx, pauses[n.failed-1]) == nil {
		klog.FromContext(ctx).Info("Trying again", "tried", n.failed, "reason", err)
		return nil
	}
	if n.failed == 1 {
		return err
	}
	return fmt.Errorf("tried %d times: %w", n.failed, err)
}

// hasTime reports whether another attempt, if it takes as long as the present one, can fail and be undone before the caller gives up: a
// kubelet that has given up is not told why.
func (n *attempts) hasTime(ctx context.Context, pause time.Duration) bool {
	deadline, limited := ctx.Deadline()
	return !limited || time.Until(deadline) > pause+time.Since(n.began)*3/2
}

// transient reports whether another attempt may succeed. If the rules have refused something, it does not.
func transient(err error) bool {
	if v := (*rules.Verdict)(nil); errors.As(err, &v) && v.State == rules.Refused {
		return false
	}
	return !errors.Is(err, gpu.ErrHung) && (gpu.Transient(err) || errors.Is(err, sharing.ErrNoSupervisor))
}
