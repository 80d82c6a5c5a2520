// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// mpsLimit is for calls with a daemon that may hang.
const mpsLimit = 2 * time.Second

// mpsEffects are the ways in which a daemon or a server can go wrong, again and
// again and once.
var mpsEffects = map[string]machine.Fault{
	"fails":                            {Effect: machine.Fail},
	"fails once":                       {Effect: machine.Fail, Times: 1},
	"fails once after it did its work": {Effect: machine.FailAfter, Times: 1},
	"does nothing":                     {Effect: machine.Pretend},
	"does nothing once":                {Effect: machine.Pretend, Times: 1},
	"dies before":                      {Effect: machine.KillBefore},
	"dies once before":                 {Effect: machine.KillBefore, Times: 1},
	"dies once after":                  {Effect: machine.KillAfter, Times: 1},
	"hangs":                            {Effect: machine.Proceed, Hang: true},
	"is slow":                          {Effect: machine.Proceed, Delay: 100 * time.Millisecond},
}

// mpsRig is a driver and a supervisor on a machine with many GPUs.
type mpsRig struct {
	n *harness.Node
	p *harness.Driver
	// users have the GPUs with an odd number.
	users []*harness.Program
}

const mpsWorkers = 4

// TestFaultsOfMPS makes everything that a control daemon and its server do for a
// claim go wrong in every way. A claim that is prepared
// has its limits all the same, one that is not leaves nothing, and the daemon of
// the next GPU has no part in it.
func TestFaultsOfMPS(t *testing.T) {
	t.Parallel()
	// What the supervisor does by itself is not part of an operation.
	quiet := newMPSRig(t, 0, "--check-interval=1m")
	r := newMPSRig(t, mpsWorkers)
	type mpsCase struct {
		operation harness.Operation
		name      string
		fault     machine.Fault
	}
	var cases []mpsCase
	for _, o := range []harness.Operation{harness.Prepare, harness.Unprepare} {
		functions := quiet.functions(t, o)
		t.Logf("%s: %v", o, functions)
		for _, function := range functions {
			for _, effect := range slices.Sorted(maps.Keys(mpsEffects)) {
				fault := mpsEffects[effect]
				fault.Function = function
				cases = append(cases, mpsCase{o, fmt.Sprintf("%s, %s %s", o, function, effect), fault})
			}
		}
	}
	count := harness.Enumerate(t, "faults", 104)
	next := make(chan mpsCase, len(cases))
	for _, c := range harness.Choose(count, cases) {
		next <- c
	}
	close(next)
	for worker := range mpsWorkers {
		t.Run("worker "+strconv.Itoa(worker), func(t *testing.T) {
			t.Parallel()
			for c := range next {
				c.fault.GPU = 2 * worker
				expect.Do(t, r.run(t, c.operation, c.fault), c.name)
				count.Ran(string(c.operation))
			}
		})
	}
}

func newMPSRig(t *testing.T, workers int, supervisorFlags ...string) *mpsRig {
	t.Helper()
	r := &mpsRig{n: harness.NewNode(t, "h100x16")}
	r.n.StartSupervisor(t, supervisorFlags...)
	r.p = r.n.Start(t, "--poll-interval=50ms")
	r.p.Ready(t)
	for worker := range workers {
		_, ids := r.p.NewClaim(t, r.n, harness.Device{GPU: 2*worker + 1, Kind: harness.MPS})
		r.users = append(r.users, r.n.StartProgram(t, ids...))
	}
	return r
}

// share makes a claim, with other limits than the usual ones.
func (r *mpsRig) share(t *testing.T, gpu int) *drapb.Claim {
	return r.n.Allocate(t, []harness.Device{{GPU: gpu, Kind: harness.MPS, Memory: 10 << 30, Percent: 30}})
}

// functions are those of daemon and server that an operation calls.
func (r *mpsRig) functions(t *testing.T, o harness.Operation) []string {
	t.Helper()
	c := r.share(t, 0)
	if o == harness.Unprepare {
		r.p.MustPrepare(t, c)
	}
	counts := (&faultRig{n: r.n}).countCalls(t, func() {
		must.Get(r.p.Call(t.Context(), o, c, harness.KubeletTimeout))(t)
	})
	r.p.MustUnprepare(t, c)
	maps.DeleteFunc(counts, func(function string, _ int) bool { return !strings.HasPrefix(function, state.MPS) })
	if len(counts) == 0 {
		t.Fatalf("%s has no daemon do anything", o)
	}
	return slices.Sorted(maps.Keys(counts))
}

// run returns what is wrong.
func (r *mpsRig) run(t *testing.T, o harness.Operation, f machine.Fault) error {
	ctx := t.Context()
	c := r.share(t, f.GPU)
	if o == harness.Unprepare {
		if _, err := r.p.TryPrepare(ctx, c, harness.KubeletTimeout); err != nil {
			return fmt.Errorf("before the fault: %w", err)
		}
	}
	fault, err := r.n.TryInject(f)
	if err != nil {
		return err
	}
	_, callErr := r.p.Call(ctx, o, c, mpsLimit)
	var errs []error
	if callErr == nil && o == harness.Prepare {
		errs = append(errs, r.checkPrepared(t, f.GPU))
	}
	if callErr != nil && o == harness.Prepare && !harness.IsTimeout(callErr) && !strings.Contains(callErr.Error(), r.n.DeviceName(t, f.GPU, "", 0)) {
		errs = append(errs, fmt.Errorf("the error does not name the GPU: %w", callErr))
	}
	if _, err := fault.TryRemove(); err != nil {
		return err
	}
	if o == harness.Prepare {
		if ids, err := r.p.TryPrepare(ctx, c, harness.KubeletTimeout); err != nil {
			errs = append(errs, fmt.Errorf("prepare without the fault: %w", err))
		} else {
			errs = append(errs, r.checkPrepared(t, f.GPU), r.checkClient(t, ids))
		}
	}
	if err := r.p.TryUnprepare(ctx, c, harness.KubeletTimeout); err != nil {
		errs = append(errs, fmt.Errorf("unprepare without the fault: %w", err))
	}
	errs = append(errs, harness.Eventually(ctx, func() error { return r.checkGone(t, f.GPU, c.GetUid()) }))
	if err := r.users[f.GPU/2].Check(); err != nil {
		errs = append(errs, fmt.Errorf("the other GPU: %w", err))
	}
	return errors.Join(errs...)
}

// checkPrepared fails unless a server holds the GPU, for itself alone.
func (r *mpsRig) checkPrepared(t *testing.T, gpu int) error {
	if mode := r.n.Machine(t).GPUs[gpu].ComputeMode; mode != harness.ExclusiveProcess {
		return fmt.Errorf("the compute mode of a prepared claim is %d", mode)
	}
	if servers := r.n.Servers(t, gpu); len(servers) != 1 {
		return fmt.Errorf("the servers of a prepared claim are %v", servers)
	}
	return nil
}

// checkClient fails unless the server holds a program to the claim's limits that
// has done away with them.
func (r *mpsRig) checkClient(t *testing.T, ids []string) error {
	out, err := r.n.RunProgram(t, harness.WithoutEnv(r.n.Container(t, ids...), "CUDA_MPS_"), "info")
	if err != nil {
		return err
	}
	for _, want := range []string{"limit 10240 MiB", "(30 %)", "as a client"} {
		if !strings.Contains(out, want) {
			return fmt.Errorf("want %q, the program says %s", want, out)
		}
	}
	return nil
}

// checkGone fails unless nothing of a claim is left.
func (r *mpsRig) checkGone(t *testing.T, gpu int, uid string) error {
	if mode := r.n.Machine(t).GPUs[gpu].ComputeMode; mode != harness.DefaultMode {
		return fmt.Errorf("GPU %d has compute mode %d", gpu, mode)
	}
	if left := r.n.Servers(t, gpu); len(left) > 0 {
		return fmt.Errorf("servers of GPU %d are left: %v", gpu, left)
	}
	if name := r.n.DeviceName(t, gpu, "", 0); slices.Contains(harness.List(t, r.n.MPSDir), name) {
		return fmt.Errorf("session %s is left", name)
	}
	return r.n.CheckNoFiles(uid)
}
