// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// worker runs one case after the other on a GPU, while another GPU works.
type worker struct {
	*faultRig

	gpu, neighbour int
}

// run returns what is wrong, all of it.
func (l *worker) run(ctx context.Context, c faultCase) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, l.repair())
		}
	}()
	claim, err := l.begin(ctx, c.operation)
	if err != nil {
		return fmt.Errorf("before the fault: %w", err)
	}
	c.fault.GPU = l.gpu
	fault, err := l.n.TryInject(c.fault)
	if err != nil {
		return err
	}
	neighbour := make(chan error, 1)
	go func() { neighbour <- l.besides(ctx) }()
	limit := harness.ShortTimeout
	if c.fault.Times == 1 {
		limit = harness.KubeletTimeout
	}
	ids, callErr := l.p.Call(ctx, c.operation, claim, limit)
	for harness.IsTimeout(callErr) && ctx.Err() == nil {
		// Nothing is known, not even that it failed.
		ids, callErr = l.p.Call(ctx, c.operation, claim, harness.KubeletTimeout)
	}
	var errs []error
	if err := <-neighbour; err != nil {
		errs = append(errs, fmt.Errorf("GPU %d, which has no fault: %w", l.neighbour, err))
	}
	struck, err := fault.TryRemove()
	if err == nil && struck == 0 {
		err = errors.New("no call was struck")
	}
	errs = append(errs, err)
	if callErr != nil {
		errs = append(errs, l.checkMessage(c, callErr))
	}
	if c.operation == harness.Prepare {
		errs = append(errs, l.afterPrepare(ctx, c, claim, ids, callErr))
	} else {
		errs = append(errs, l.afterUnprepare(ctx, claim, callErr))
	}
	return errors.Join(errs...)
}

// besides uses the other GPU, in a way that takes little time.
func (l *worker) besides(ctx context.Context) error {
	if l.layout.usesMPS() {
		return (&worker{faultRig: &faultRig{n: l.n, p: l.p, layout: faultLayout{at: l.layout.at, beside: l.layout.beside}, mode: l.mode}}).roundTrip(ctx, l.neighbour)
	}
	return l.roundTrip(ctx, l.neighbour)
}

// roundTrip prepares and unprepares a claim on a GPU without faults.
func (l *worker) roundTrip(ctx context.Context, gpu int) error {
	claim, err := l.allocateOn(gpu)
	if err != nil {
		return err
	}
	ids, err := l.p.TryPrepare(ctx, claim, harness.KubeletTimeout)
	if err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	if err := l.checkPrepared(claim.GetUid(), ids, gpu); err != nil {
		return err
	}
	if err := l.p.TryUnprepare(ctx, claim, harness.KubeletTimeout); err != nil {
		return fmt.Errorf("unprepare: %w", err)
	}
	return l.checkClean(ctx, gpu, claim.GetUid())
}

// afterPrepare checks what a Prepare that was struck left, after the fault is
// gone.
func (l *worker) afterPrepare(ctx context.Context, c faultCase, claim *drapb.Claim, ids []string, callErr error) error {
	switch {
	case callErr == nil:
		// It did without the call, or repeated it.
	case c.fault.Times == 1:
		// What failed is undone at once where nothing else goes wrong.
		if err := l.checkClean(ctx, l.gpu, claim.GetUid()); err != nil {
			return fmt.Errorf("it failed and left something: %w", errors.Join(err, l.cleanUp(ctx, claim)))
		}
		return l.cleanUp(ctx, claim)
	default:
		var err error
		if ids, err = l.p.TryPrepare(ctx, claim, harness.KubeletTimeout); err != nil {
			return fmt.Errorf("prepare again without the fault: %w", errors.Join(err, l.cleanUp(ctx, claim)))
		}
	}
	return errors.Join(l.checkPrepared(claim.GetUid(), ids, l.gpu), l.cleanUp(ctx, claim))
}

// checkPrepared fails unless a claim has its device, and MPS keeps all others away
// from it where the claim uses that.
func (l *worker) checkPrepared(uid string, ids []string, gpu int) error {
	if err := l.n.CheckPrepared(uid, ids, gpu, l.layout.at); err != nil || !l.layout.usesMPS() {
		return err
	}
	m, err := l.n.State.Snapshot()
	if err != nil {
		return err
	}
	r := harness.Device{GPU: gpu, Profile: l.layout.at.Profile, Start: l.layout.at.Start, Kind: l.layout.kind}
	return harness.CheckModes(harness.ClaimSpec{}, r, &m.GPUs[gpu])
}

// cleanUp unprepares, after which nothing may be left.
func (l *worker) cleanUp(ctx context.Context, claim *drapb.Claim) error {
	if err := l.p.TryUnprepare(ctx, claim, harness.KubeletTimeout); err != nil {
		return fmt.Errorf("unprepare without a fault: %w", err)
	}
	return l.checkClean(ctx, l.gpu, claim.GetUid())
}

// afterUnprepare checks what an Unprepare that was struck left, after the fault
// is gone. Where it succeeded, nobody asks again, and the next claim for the
// place finishes what is left.
func (l *worker) afterUnprepare(ctx context.Context, claim *drapb.Claim, callErr error) error {
	if callErr != nil {
		return l.cleanUp(ctx, claim)
	}
	pending := l.checkGone(l.gpu, claim.GetUid()) != nil
	if pending {
		err := l.checkPending(claim.GetUid())
		// The driver may finish it by itself at any moment.
		pending = l.checkGone(l.gpu, claim.GetUid()) != nil
		if pending && err != nil {
			return fmt.Errorf("it succeeded and left something: %w", err)
		}
	}
	if pending {
		next := l.nextClaim
		if l.layout.kind != "" { // another share has room beside it
			next = func(ctx context.Context, _ int) error { return l.useWhole(ctx) }
		}
		if err := next(ctx, l.gpu); err != nil {
			return fmt.Errorf("the next claim: %w", err)
		}
		return l.checkClean(ctx, l.gpu, claim.GetUid())
	}
	if l.checkMode(l.gpu) == nil {
		return nil
	}
	// The last partition is gone and turning MIG mode off failed, which is no
	// reason to keep a pod. The mode is nobody's, and the next claim changes it.
	if err := l.useWhole(ctx); err != nil {
		return fmt.Errorf("MIG mode was left on: %w", err)
	}
	return l.checkMode(l.gpu)
}

// nextClaim is roundTrip for a claim that has another partition in the same place.
func (l *worker) nextClaim(ctx context.Context, gpu int) error {
	next := *l.faultRig
	next.layout.at = l.layout.next
	return (&worker{faultRig: &next, gpu: l.gpu, neighbour: l.neighbour}).roundTrip(ctx, gpu)
}

// checkPending fails unless it is written down that a claim is to be released,
// and no container can get its devices.
func (l *worker) checkPending(uid string) error {
	r, err := l.n.Record(uid)
	if err != nil {
		return err
	}
	if r == nil || r.State != harness.StateReleasing {
		return fmt.Errorf("the journal says %+v: %w", r, l.checkGone(l.gpu, uid))
	}
	if ids, err := os.ReadDir(l.n.CDIDir); err != nil || slices.ContainsFunc(ids, func(e os.DirEntry) bool {
		return strings.Contains(e.Name(), uid)
	}) {
		return errors.Join(err, errors.New("its CDI file is there"))
	}
	return nil
}

// useWhole prepares and unprepares the undivided GPU.
func (l *worker) useWhole(ctx context.Context) error {
	whole := &worker{faultRig: &faultRig{n: l.n, p: l.p}}
	return whole.roundTrip(ctx, l.gpu)
}

// checkMessage fails unless the error names the GPU and the call that went wrong. A wrong
// answer that is no error only comes to light in a later call.
func (l *worker) checkMessage(c faultCase, err error) error {
	m, readErr := l.n.State.Snapshot()
	if readErr != nil {
		return readErr
	}
	wants := []string{m.GPUs[l.gpu].PCIAddress, c.fault.Function}
	if c.isAnswer() {
		wants = wants[:1]
	}
	for _, want := range wants {
		if !strings.Contains(err.Error(), want) {
			return fmt.Errorf("the error does not name %s: %w", want, err)
		}
	}
	return nil
}

// checkClean fails unless nothing of a claim is left and the GPU is as it was
// before.
func (l *worker) checkClean(ctx context.Context, gpu int, uid string) error {
	check := func() error { return errors.Join(l.checkGone(gpu, uid), l.checkMode(gpu)) }
	if l.layout.usesMPS() {
		// On a busy machine the end of a session may go on in the background.
		return harness.Eventually(ctx, check)
	}
	return check()
}

// checkGone fails unless nothing of a claim is left.
func (l *worker) checkGone(gpu int, uid string) error {
	m, err := l.n.State.Snapshot()
	if err != nil {
		return err
	}
	var want []harness.Place
	if l.layout.beside.Profile != "" {
		want = append(want, l.layout.beside)
	}
	g := &m.GPUs[gpu]
	if diff := cmp.Diff(want, harness.Places(g)); diff != "" {
		return fmt.Errorf("instances of GPU %d (-want +got):\n%s", gpu, diff)
	}
	if g.ComputeMode != harness.DefaultMode {
		return fmt.Errorf("GPU %d has compute mode %d", gpu, g.ComputeMode)
	}
	if server := slices.IndexFunc(m.Processes, func(p machine.Process) bool { return p.GPU == gpu && p.Kind == machine.MPSServer }); server >= 0 {
		return fmt.Errorf("GPU %d has an MPS server: %+v", gpu, m.Processes[server])
	}
	return l.n.CheckNoFiles(uid)
}

// checkMode fails unless the GPU is in the MIG mode in which it was at first,
// where cases do not begin in another.
func (l *worker) checkMode(gpu int) error {
	m, err := l.n.State.Snapshot()
	if err != nil {
		return err
	}
	mig := m.GPUs[gpu].MIG
	if l.layout.before == nil && (mig.Current != l.mode || mig.Pending != l.mode) {
		return fmt.Errorf("GPU %d: MIG mode is on: %v, pending: %v, it was %v", gpu, mig.Current, mig.Pending, l.mode)
	}
	return nil
}

// repair undoes what a failed case left on the GPU, so that it does not fail the next one.
func (l *worker) repair() error {
	return l.n.State.Update(func(m *machine.Machine) error {
		g := &m.GPUs[l.gpu]
		g.ComputeMode = harness.DefaultMode
		if g.MIG == nil {
			return nil
		}
		kept := l.layout.beside.Find(g)
		g.MIG.Current, g.MIG.Pending = l.mode, l.mode
		g.MIG.Instances = slices.DeleteFunc(g.MIG.Instances, func(in machine.GPUInstance) bool {
			return kept == nil || in.ID != kept.ID
		})
		return nil
	})
}

// allocateOn makes a claim for the layout's device on a GPU.
func (l *worker) allocateOn(gpu int) (*drapb.Claim, error) {
	m, err := l.n.State.Snapshot()
	if err != nil {
		return nil, err
	}
	if gpu >= len(m.GPUs) {
		return nil, fmt.Errorf("the machine has %d GPUs", len(m.GPUs))
	}
	r := harness.Device{GPU: gpu, Profile: l.layout.at.Profile, Start: l.layout.at.Start, Kind: l.layout.kind}
	return l.n.AllocateDevices([]string{r.Name(m.GPUs[gpu].PCIAddress)}, []harness.Device{r}), nil
}
