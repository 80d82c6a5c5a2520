// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// patient makes the driver wait for a call that is held longer than any test holds it: slow is
// not hung.
var patient = []string{"--nvml-call-limit=45s"}

// slowCases are the calls that are held, one at a time: of each function the first and the last.
func slowCases(counts callCounts) []faultCase {
	var cases []faultCase
	counts.each(func(o harness.Operation, function string, calls int) {
		for _, skip := range slices.Compact([]int{0, calls - 1}) {
			cases = append(cases, slowCase(o, function, skip))
		}
	})
	return cases
}

func slowCase(o harness.Operation, function string, skip int) faultCase {
	return faultCase{operation: o, fault: machine.Fault{Function: function, Skip: skip, Times: 1, Hang: true, Effect: machine.Proceed}}
}

// runSlow holds a call of an operation. A claim on the other GPU comes and goes meanwhile, and when
// the call goes on, its claim is prepared or released as if nothing had been.
func (l *worker) runSlow(ctx context.Context, c faultCase) (err error) {
	claim, err := l.begin(ctx, c.operation)
	if err != nil {
		return fmt.Errorf("before the call is held: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.p.TryUnprepare(ctx, claim, harness.KubeletTimeout), l.repair())
		}
	}()
	c.fault.GPU = l.gpu
	fault, err := l.n.TryInject(c.fault)
	if err != nil {
		return err
	}
	answer := l.answer(ctx, c.operation, claim)
	held := harness.Eventually(ctx, fault.CheckStruck)
	if held == nil {
		held = l.neighbourGoes(ctx)
	}
	_, removeErr := fault.TryRemove()
	a := <-answer
	if err := errors.Join(held, removeErr); err != nil {
		return err
	}
	if a.err != nil {
		return fmt.Errorf("the call went on, and the answer is: %w", a.err)
	}
	if c.operation == harness.Unprepare {
		// A release answers although who uses the GPU is not known in time, and goes on later.
		if err := l.p.TryUnprepare(ctx, claim, harness.KubeletTimeout); err != nil {
			return err
		}
		return l.checkClean(ctx, l.gpu, claim.GetUid())
	}
	return errors.Join(l.checkPrepared(claim.GetUid(), a.ids, l.gpu), l.cleanUp(ctx, claim))
}

// answered is what the kubelet hears.
type answered struct {
	ids []string
	err error
}

// answer makes a call.
func (l *worker) answer(ctx context.Context, o harness.Operation, claim *drapb.Claim) <-chan answered {
	answers := make(chan answered, 1)
	go func() {
		ids, err := l.p.Call(ctx, o, claim, harness.KubeletTimeout)
		answers <- answered{ids, err}
	}()
	return answers
}

// enoughTime is for what has nothing to do with a call that is held. Only what waits for the call takes as long.
const enoughTime = 40 * time.Second

// neighbourGoes fails if a claim on the other GPU does not come and go while a call is held.
func (l *worker) neighbourGoes(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, enoughTime)
	defer cancel()
	if err := l.besides(ctx); err != nil {
		return fmt.Errorf("GPU %d, of which no call is held: %w", l.neighbour, err)
	}
	return nil
}
