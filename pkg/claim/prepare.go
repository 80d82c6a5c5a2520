// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/plan"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/steptime"
	"github.com/partage-dev/partage/pkg/wait"
)

// PreparedDevice is what the kubelet learns of a device.
type PreparedDevice struct {
	Requests     []string
	Pool         string
	Device       string
	CDIDeviceIDs []string
	ShareID      *types.UID
	// Admin marks a device that the claim only observes.
	Admin bool
}

// Prepare makes all devices of a claim ready for containers, or none: when a
// step fails, what was done is undone before the call returns, and what cannot
// be undone is written down for Reconcile. Repeating the call gives the same
// answer.
//
// It waits for up to 15 seconds for a place that another claim still holds, and
// tries again five times, within 8 seconds or so, what fails for a reason that may
// pass, both within ctx. A call that is older than the claim's release is refused, see
// [Arrived].
//
// Errors name the device. They wrap *RefusedError where the claim cannot be prepared as it
// is, and *api.InvalidError for a bad configuration,
// *OverlapError when another claim holds the place, sharing.ErrNoSupervisor when
// nothing starts MPS, and the reasons of package gpu when the hardware refuses.
func (m *Manager) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]PreparedDevice, error) {
	arrived := m.arrival(ctx)
	planned, err := m.plan(claim)
	if err != nil || len(planned.Record.Devices) == 0 {
		return nil, err
	}
	planned.Record.Arrived = arrived
	unlock, err := m.locks.Claim(ctx, claim.UID)
	if err != nil {
		return nil, err
	}
	defer unlock()

	late, err := m.store.Released(claim.UID, arrived)
	if err != nil {
		return nil, err
	}
	if late {
		return nil, journal.ErrOutOfDate
	}
	p := &preparation{engine: m.engine, plan: planned, start: planned.Record}
	record, err := p.run(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.dropQuarantined(ctx, claim.UID, record); err != nil {
		return nil, err
	}
	return prepared(record), nil
}

// RefusedError is why a claim cannot be prepared as it is, for example because of an
// invalid configuration. Nothing was touched, so that nothing can be left.
type RefusedError struct{ Err error }

func (e *RefusedError) Error() string { return e.Err.Error() }

func (e *RefusedError) Unwrap() error { return e.Err }

func (m *Manager) plan(claim *resourceapi.ResourceClaim) (*plan.Plan, error) {
	if err := journal.CheckUID(claim.UID); err != nil {
		return nil, err
	}
	inventory := m.inventory.Load()
	if inventory == nil {
		return nil, errNoInventory
	}
	planned, err := plan.New(claim, plan.Node{Driver: m.driver, Pool: m.pool, BootID: m.store.Boot(), Inventory: inventory})
	if err != nil {
		return nil, &RefusedError{err}
	}
	return planned, nil
}

func prepared(r *journal.Record) []PreparedDevice {
	var devices []PreparedDevice
	for i := range r.Devices {
		d := &r.Devices[i]
		devices = append(devices, PreparedDevice{
			Requests: d.Requests, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID, Admin: d.Admin,
			CDIDeviceIDs: []string{d.CDIDevice},
		})
	}
	return devices
}

// preparation is one call of Prepare. The claim's lock is held.
type preparation struct {
	*engine
	plan *plan.Plan
	// start is the record that the preparation begins with: the plan's, with what an
	// earlier attempt has written down.
	start *journal.Record
	// earlier is the record of a claim that was prepared before, or nil.
	earlier *journal.Record
	// known are the keys of the devices that an earlier attempt has begun with.
	known []string
	// doubtful means that an earlier attempt may have begun with any of the others, until
	// they are undone.
	doubtful bool
	undone   []bool
	journal  *recorder
}

// run prepares all groups at the same time, and then what belongs to the claim.
func (p *preparation) run(ctx context.Context) (*journal.Record, error) {
	if err := p.resume(ctx); err != nil {
		return nil, err
	}
	groups := step.Groups(p.start)
	p.journal = newRecorder(ctx, p.store, p.start, len(groups))
	p.undone = make([]bool, len(groups))
	for i, g := range groups {
		if slices.Contains(p.known, g.Part.Devices[0].Key()) {
			p.journal.set(i, g.Part)
		}
	}
	if len(groups) == 1 {
		// The claim's own steps are taken under the same locks.
		if err := p.prepareGroup(ctx, groups, 0); err != nil {
			return nil, err
		}
		return p.record(), nil
	}
	err := p.prepareGroups(ctx, groups)
	if err == nil {
		err = p.finish(ctx, groups)
	}
	if err != nil {
		return nil, p.undoGroups(ctx, groups, err)
	}
	return p.record(), nil
}

// prepareGroups stops all groups when one fails.
func (p *preparation) prepareGroups(ctx context.Context, groups []step.Group) error {
	limited, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := concurrently(ctx, len(groups), func(i int) error {
		err := p.prepareGroup(limited, groups, i)
		if err != nil {
			cancel()
		}
		return err
	})
	// That a group was stopped is nobody's concern, unless it has left something.
	causes := slices.DeleteFunc(slices.Clone(errs), func(err error) bool {
		var clean *cleanError
		return err == nil || errors.Is(err, context.Canceled) && errors.As(err, &clean)
	})
	if len(causes) > 0 {
		return errors.Join(causes...)
	}
	return errors.Join(errs...)
}

// prepareGroup tries again while that may help. Between two attempts the group's locks
// are free.
func (p *preparation) prepareGroup(ctx context.Context, groups []step.Group, i int) error {
	limited, cancel := context.WithTimeout(ctx, retryTime)
	defer cancel()
	for tried := 1; ; tried++ {
		err := p.waitForRoom(ctx, func() error { return p.attemptGroup(ctx, groups, i) })
		if err == nil {
			return nil
		}
		if !transient(err) || tried > len(retryPauses) || pause(limited, retryPauses[tried-1]) != nil {
			if tried > 1 {
				err = fmt.Errorf("tried %d times: %w", tried, err)
			}
			return err
		}
		klog.FromContext(ctx).Info("Trying again", "tried", tried, "reason", err)
	}
}

// pause waits before another attempt.
func pause(ctx context.Context, d time.Duration) error {
	defer steptime.Of(ctx).Begin(steptime.Wait)()
	return wait.For(ctx, d)
}

// attemptGroup makes the devices of one group under its locks: look, check, write down,
// apply. What fails is undone before the locks are free again.
func (p *preparation) attemptGroup(ctx context.Context, groups []step.Group, i int) error {
	unlock, err := p.locks.GPUs(ctx, groups[i].GPUs)
	if err != nil {
		return clean(err)
	}
	defer unlock()
	part, attempt := p.begun(i)
	known := part != nil
	if !known {
		part = step.PartOf(p.plan.Record, groups[i])
	}
	s, err := p.scene(ctx, part, attempt)
	if err != nil {
		return cleanIf(attempt == step.First, err)
	}
	s.MaxShares = p.plan.MaxShares
	if attempt == step.Repeated {
		if err := p.verify(ctx, groups, i, s); err != nil {
			return clean(fmt.Errorf("the claim was prepared before: %w", err))
		}
		return nil
	}
	if !known {
		step.KeepIntervals(part, s.Others)
	}
	// What an earlier attempt has made and written down may be gone by now.
	step.MarkGone(s)
	steps := p.steps(groups, part)
	if err := step.Check(steps, s); err != nil {
		return cleanIf(attempt == step.First, err)
	}
	if err := p.dropStaleSpecs(ctx, s); err != nil {
		return cleanIf(attempt == step.First, err)
	}
	if err := p.intend(groups, i, part); err != nil {
		if attempt == step.First {
			err = errors.Join(err, p.journal.drop(i))
		}
		return err
	}
	begun, err := step.Apply(ctx, steps, s)
	if err == nil {
		err = p.done(ctx, groups, i, part)
	}
	if err == nil {
		return nil
	}
	if attempt != step.First {
		begun = len(steps)
	}
	return p.undo(ctx, i, steps, begun, s, err)
}

// intend writes down what will be done. A group that is only observed holds nothing: it
// is written down with the others.
func (p *preparation) intend(groups []step.Group, i int, part *journal.Record) error {
	observed := !slices.ContainsFunc(part.Devices, func(d journal.Device) bool { return !d.Admin })
	if observed && len(groups) > 1 {
		p.journal.set(i, part)
		return nil
	}
	return p.journal.save(i, part)
}

// steps are those of a group, and the claim's own where there is no other group.
func (p *preparation) steps(groups []step.Group, part *journal.Record) []step.Step {
	steps := p.kit.Steps(part)
	if len(groups) == 1 {
		steps = append(steps, p.kit.ClaimSteps(part)...)
	}
	return steps
}

// done notes what has become of a group, for good where there is no other.
func (p *preparation) done(ctx context.Context, groups []step.Group, i int, part *journal.Record) error {
	p.journal.set(i, part)
	if len(groups) > 1 {
		return nil
	}
	return p.commit(ctx)
}

// undoTime bounds what is undone after a failure. It is granted on top of the
// caller's deadline, which may be why the call failed.
const undoTime = 30 * time.Second

// undo takes back what was begun of a group, and returns the error with what became of
// that. What it cannot take back stays written down as Unpreparing.
func (p *preparation) undo(ctx context.Context, i int, steps []step.Step, begun int, s *step.Scene, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	p.journal.notPrepared()
	left := errors.Join(step.Undo(ctx, steps, begun, s)...)
	if left == nil {
		left = p.journal.drop(i)
		p.undone[i] = left == nil
	} else {
		p.journal.state(journal.Unpreparing)
		left = errors.Join(left, p.kit.CDI.Remove(s.Record.Claim.UID), p.journal.save(i, s.Record))
	}
	if left == nil {
		return clean(cause)
	}
	return errors.Join(cause, fmt.Errorf("undo: %w", left))
}

// undoGroups takes back the groups that were made, when another one failed. Nothing is
// undone of a claim that was prepared before: containers may be running on it.
func (p *preparation) undoGroups(ctx context.Context, groups []step.Group, cause error) error {
	if p.earlier != nil {
		return cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	p.journal.state(journal.Unpreparing)
	filesErr := p.releaseFiles(ctx, p.start.Claim.UID)
	errs := concurrently(ctx, len(groups), func(i int) error {
		part := p.journal.part(i)
		if part == nil {
			return nil
		}
		return errors.Join(p.releaseGroup(ctx, p.journal, i, groups[i].GPUs, part)...)
	})
	if err := errors.Join(append(errs, filesErr)...); err != nil {
		return errors.Join(cause, fmt.Errorf("undo: %w", err))
	}
	return cause
}

// finish takes the steps that belong to a claim with several groups. Once the CDI spec
// is written it is confirmed that the partitions are still those that it names: a later
// creation of another one there removes the spec. A spec that is right already stays as
// it is, so that a call that ends early takes nothing from running pods.
func (p *preparation) finish(ctx context.Context, groups []step.Group) error {
	r := p.record()
	s := &step.Scene{Record: r, Attempt: step.Resumed}
	if len(p.known) == 0 && !p.doubtful {
		s.Attempt = step.First
	}
	standing := p.specStands(ctx, r)
	steps := p.kit.ClaimSteps(r)
	if standing {
		steps = p.kit.LimitSteps(r)
	}
	begun, err := step.Apply(ctx, steps, s)
	if err == nil && !standing {
		err = p.confirm(ctx, groups)
	}
	if err == nil {
		p.journal.setAll(groups, r)
		err = p.commit(ctx)
	}
	switch {
	case err == nil || standing:
		return err
	case p.earlier != nil:
		// What it names may not be the claim's any more.
		return errors.Join(err, p.kit.CDI.Remove(r.Claim.UID))
	}
	return errors.Join(append([]error{err}, step.Undo(context.WithoutCancel(ctx), steps, begun, s)...)...)
}

// commit writes down that the claim is prepared, unless the journal says so already.
func (p *preparation) commit(ctx context.Context) error {
	p.journal.state(journal.Prepared)
	r := p.record()
	if p.earlier != nil && r.SameOutcome(p.earlier) {
		outdated, err := p.store.Released(r.Claim.UID, p.earlier.Arrived)
		if err != nil || !outdated {
			return err
		}
	}
	return p.save(ctx, r)
}

// record returns what has become of the claim, in the order of the plan.
func (p *preparation) record() *journal.Record {
	r := p.journal.record()
	r.Arrange(p.plan.Record)
	return r
}
