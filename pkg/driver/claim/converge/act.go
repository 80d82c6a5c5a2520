// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/steptime"
)

// work is the execution of one task, under the locks of its GPUs.
type work struct {
	*Engine
	// seen are the observations that the task follows from, by PCI address, with the instances and sessions that it has made.
	seen map[string]*observation
	task rules.Task
	// ids are the qualified names of devices in the CDI spec that was written, and arrived is when the call arrived that wants it.
	ids     map[string]string
	arrived time.Duration
}

// act carries out the actions of a task in order, until one fails. It returns a refusal if that action definitely had no
// effect.
func (e *Engine) act(ctx context.Context, task rules.Task, seen map[string]*observation) (*rules.Refusal, error) {
	w := &work{Engine: e, seen: seen, task: task}
	var left []error
	failed := map[string]bool{}
	for i := 0; i < len(task.Actions); {
		n := together(task.Actions[i:])
		actions := task.Actions[i : i+n]
		i += n
		if len(left) > 0 && waitsFor(actions, failed) {
			continue
		}
		err := w.do(ctx, actions)
		w.inUse.note(actions[0], err)
		if left := toleratedOnRelease[actions[0].Kind]; err != nil && task.Aim == rules.Release && left != "" && !errors.Is(err, gpu.ErrHung) {
			klog.FromContext(ctx).Error(err, "Something stays where a claim is released", "claimUID", task.Claim, "pciAddress", actions[0].GPU, "what", left)
			err = nil
		}
		if err == nil {
			continue
		}
		err = w.wrap(actions[0], err)
		if task.Aim == rules.Release && actions[0].Key != "" && !gpu.IsPending(err) {
			// What else the claim has on the GPU need not wait with it: processes may keep only one partition.
			left, failed[actions[0].Key] = append(left, err), true
			continue
		}
		var refusal *rules.Refusal
		if refused := (*partition.RefusedError)(nil); errors.As(err, &refused) {
			refusal = &rules.Refusal{Action: actions[0], Err: err}
		}
		return refusal, errors.Join(append(left, err)...)
	}
	return nil, errors.Join(left...)
}

// toleratedOnRelease are the actions that may fail when a claim is released, and what stays then. That does no harm: the next claim of the
// whole GPU turns MIG mode off, and nobody can use a spec without the claim.
var toleratedOnRelease = map[rules.ActionKind]string{
	rules.StartSession: "the limits of an MPS session", rules.DisableMIG: "MIG mode without an instance", rules.RemoveSpec: "the CDI spec",
}

// inUse has a rules.Statement by PCI address, about what could not be made on the GPU because it is in use.
type inUse struct{ sync.Map }

// note remembers what could not be made because the GPU is in use, until something can be made there.
func (u *inUse) note(a rules.Action, err error) {
	switch {
	case a.Kind != rules.CreateGI && a.Kind != rules.SetExclusive && a.Kind != rules.StartSession:
	case errors.Is(err, gpu.ErrInUse):
		u.Store(a.GPU, rules.Statement{Place: a.Place, Reason: rules.RefusedInUse, Text: "GPU " + a.GPU + ": " + err.Error()})
	case err == nil:
		u.Delete(a.GPU)
	}
}

// waitsFor reports whether actions of a release have to wait because those for some devices have failed.
func waitsFor(actions []rules.Action, failed map[string]bool) bool {
	return slices.ContainsFunc(actions, func(a rules.Action) bool {
		return failed[a.Key] || a.Kind == rules.Clear || a.Kind == rules.DisableMIG
	})
}

// together returns how many of the actions change one record, so that it is written once.
func together(actions []rules.Action) (n int) {
	for n < len(actions) && actions[n].Claim == actions[0].Claim && isNoted(actions[n].Kind) {
		n++
	}
	return max(n, 1)
}

// marksOf are the marks that actions leave in a record.
var marksOf = map[rules.ActionKind]record.Mark{rules.Start: record.Started, rules.Announce: record.Announced, rules.Unstart: record.Untouched, rules.MarkLost: record.Lost}

// isNoted reports whether an action changes what a record says of a claim that is not released.
func isNoted(kind rules.ActionKind) bool {
	_, marks := marksOf[kind]
	return marks || kind == rules.MarkPrepared
}

// wrap adds the name of the published device that the action is about to an error.
func (w *work) wrap(a rules.Action, err error) error {
	if r := w.record(a); r != nil && a.Key != "" {
		if d := r.Device(a.Key); d != nil {
			return fmt.Errorf("device %s: %w", d.Device, err)
		}
	}
	return err
}

// record returns the record of an action's claim as it was observed. If there is none in force, it returns what the claim's call wants.
func (w *work) record(a rules.Action) *record.Record {
	if r := w.seen[a.GPU].snapshot.Of(a.Claim); r != nil && r.BootID == w.Store.Boot() && r.State != record.Releasing {
		return r
	}
	if call := w.call(a); call != nil {
		return call.Wanted
	}
	return w.seen[a.GPU].snapshot.Of(a.Claim)
}

// call is the Prepare for an action's claim that was at work when the GPU was observed, or nil.
func (w *work) call(a rules.Action) *Call { return w.seen[a.GPU].calls[a.Claim] }

func (w *work) do(ctx context.Context, actions []rules.Action) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("it is left for later: %w", err) // as if the process had been killed
	}
	a := actions[0]
	switch a.Kind {
	case rules.Start, rules.Announce, rules.Unstart, rules.MarkLost, rules.MarkPrepared, rules.NoteSessions:
		end := steptime.Of(ctx).Begin(steptime.Journal)
		err := w.note(ctx, actions)
		if end(); err != nil && w.ids != nil && w.Store.Released(a.Claim, w.arrived) {
			// The release did not wait for the GPU, and may have removed the spec before it was written.
			err = errors.Join(err, w.Specs.Remove(ctx, a.Claim))
		}
		return err
	case rules.Clear:
		w.clear(ctx, a)
		return nil
	case rules.ClearGuard:
		return w.Store.ClearGuards(a.Claim, a.GPU)
	case rules.DropGuard:
		return w.Store.DropGuards(a.Claim)
	case rules.WriteSpec:
		return w.writeSpec(ctx, a)
	case rules.RemoveSpec:
		return w.Specs.Remove(ctx, a.Claim)
	}
	return w.change(ctx, a)
}

// change has an effect on the hardware.
func (w *work) change(ctx context.Context, a rules.Action) error {
	switch a.Kind {
	case rules.EnableMIG, rules.DisableMIG:
		return w.Partitions.SetMode(ctx, a.GPU, a.Kind == rules.EnableMIG)
	case rules.CreateGI, rules.CreateCI:
		return w.create(ctx, a)
	case rules.DropNamesakes:
		return w.dropNamesakes(ctx, a)
	case rules.DestroyCI, rules.DestroyGI:
		return w.destroy(ctx, a)
	case rules.SetExclusive, rules.SetDefault:
		return w.Sharing.SetExclusive(ctx, w.device(a), a.Kind == rules.SetExclusive)
	case rules.StartSession:
		return w.startSession(ctx, a)
	case rules.StopSession:
		return w.Sharing.End(ctx, a.Session)
	case rules.SetInterval:
		err := w.Sharing.SetInterval(ctx, w.device(a), a.Interval)
		if w.intervals.Delete(a.GPU); err == nil {
			w.intervals.Store(a.GPU, true)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return &partition.RefusedError{Err: err} // there is no program to set it
		}
		return err
	case rules.ResetInterval:
		return w.resetInterval(ctx, a)
	}
	return fmt.Errorf("nothing is known of action %d", a.Kind)
}

func (w *work) create(ctx context.Context, a rules.Action) error {
	if a.Kind == rules.CreateGI {
		id, err := w.Partitions.CreateInstance(ctx, a.Place.On(a.GPU))
		if state := &w.seen[a.GPU].Hardware.MIGState; err == nil {
			state.Instances = append(state.Instances, gpu.Instance{ID: id, ProfileID: a.Place.ProfileID, Placement: a.Place.Placement})
		}
		return err
	}
	i := w.instance(a)
	if i == nil {
		return fmt.Errorf("there is no GPU instance with %s: %w", a.Place.On(a.GPU), gpu.ErrNotFound)
	}
	live, err := w.Partitions.CreateCompute(ctx, a.GPU, i.ID)
	if err == nil {
		i.Compute = []gpu.ComputeInstance{{ID: live.ComputeID, UUID: live.UUID}}
	}
	return err
}

// dropNamesakes removes the CDI specs of other claims that may name the ID of a new GPU instance, before anything can run in
// it. IDs are reused, so a spec stays only if its claim is known to have another instance.
func (w *work) dropNamesakes(ctx context.Context, a rules.Action) error {
	made := w.instance(a)
	if made == nil {
		return nil
	}
	state := w.seen[a.GPU].Hardware.MIGState
	for _, d := range w.seen[a.GPU].snapshot.On(a.GPU) {
		if d.Record.Claim.UID == a.Claim || d.Partition == nil || d.Mark == record.Started && a.Place == d.Place() {
			continue // its own, or a share of the same partition
		}
		if there := partition.Instance(state, d.Address()); there != nil && d.Partition.Made != nil && d.Partition.Made.InstanceID == there.ID && there.ID != made.ID {
			continue // it names what it has
		}
		klog.FromContext(ctx).Info("Removing the CDI spec of a claim whose partition is gone", "other", d.Record.Claim, "device", d.Device.Device)
		if err := w.Specs.Remove(ctx, d.Record.Claim.UID); err != nil {
			return fmt.Errorf("remove the CDI spec of claim %s, whose partition is gone: %w", d.Record.Claim, err)
		}
	}
	return nil
}

// instance is the GPU instance in an action's place, or nil.
func (w *work) instance(a rules.Action) *gpu.Instance {
	return partition.Instance(w.seen[a.GPU].Hardware.MIGState, a.Place.On(a.GPU))
}

func (w *work) destroy(ctx context.Context, a rules.Action) error {
	i := w.instance(a)
	if i == nil {
		return nil
	}
	if a.Kind == rules.DestroyGI {
		return w.Partitions.DestroyInstance(ctx, a.GPU, i.ID)
	}
	for _, c := range i.Compute {
		if err := w.Partitions.DestroyCompute(ctx, a.GPU, i.ID, c.ID); err != nil {
			return err
		}
	}
	return nil
}

// resetInterval takes a time slice back. One that the NVIDIA driver has forgotten needs no reset.
func (w *work) resetInterval(ctx context.Context, a rules.Action) error {
	err := w.Sharing.SetInterval(ctx, w.device(a), policy.IntervalDefault)
	switch {
	case errors.Is(err, gpu.ErrNotSupported):
		klog.FromContext(ctx).Info("The time slice of a GPU cannot be reset, as the driver does not support any", "pciAddress", a.GPU, "reason", err)
		return nil
	case errors.Is(err, fs.ErrNotExist):
		// nvidia-smi goes with the driver, and comes back with it.
		return fmt.Errorf("the driver's program is missing: %w", err)
	}
	return err
}

// device is the GPU of an action, with the UUID that is known now, or that of a record.
func (w *work) device(a rules.Action) sharing.Device {
	return sharing.Device{PCIAddress: a.GPU, UUID: w.seen[a.GPU].uuid()}
}
