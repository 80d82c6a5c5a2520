// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
)

// attempt is one call of Start, with what there is to undo when it fails.
type attempt struct {
	*Manager
	session Session
	adopt   bool
	before  *mps.Status // nil: there was no such session

	// occupied are the devices whose mode is EXCLUSIVE_PROCESS for the session, or
	// may have become that.
	occupied []Device
	asked    bool // the supervisor, for the session
	// unknown: it has not answered, and may be about to do what it was asked for.
	unknown bool
}

// start lets nobody but the session's server use the devices, before the session
// runs and while it does: a client that does not reach its daemon runs without
// limits where the mode is DEFAULT.
func (a *attempt) start(ctx context.Context) (Live, error) {
	for _, d := range a.session.Devices {
		if err := a.occupy(ctx, d); err != nil {
			return Live{}, err
		}
	}
	a.asked = true
	status, err := a.supervisor.Ensure(ctx, a.session.spec())
	if err != nil {
		a.unknown = ctx.Err() != nil || errors.Is(err, mps.ErrUnavailable)
		return Live{}, supervised(err)
	}
	if status.Phase != mps.Running {
		return Live{}, fmt.Errorf("MPS session %s is %s and not %s: %s", a.session.ID, status.Phase, mps.Running, status.Message)
	}
	for _, d := range a.occupied {
		if err := a.confirm(ctx, d); err != nil {
			return Live{}, err
		}
	}
	return Live{PipeDir: status.PipeDir, ShmDir: status.ShmDir, Losses: status.Losses}, nil
}

// occupy makes the device's mode EXCLUSIVE_PROCESS.
func (a *attempt) occupy(ctx context.Context, d Device) error {
	mode, err := a.modes.ComputeMode(ctx, d.PCIAddress, d.UUID)
	switch {
	case modeless(ctx, d, err):
		return nil
	case err != nil:
		return fmt.Errorf("read the compute mode of %s: %w", d, err)
	case mode == gpu.ComputeExclusiveProcess && (a.adopt || a.had(d)):
		a.occupied = append(a.occupied, d)
	case mode != gpu.ComputeDefault:
		return fmt.Errorf("%s: compute mode is %s and was not set by this driver; set it back with nvidia-smi -i %s -c %s",
			d, mode, d.UUID, gpu.ComputeDefault)
	default:
		// It counts as occupied before it is: a call that fails may have an effect.
		a.occupied = append(a.occupied, d)
		err := a.modes.SetComputeMode(ctx, d.PCIAddress, d.UUID, gpu.ComputeExclusiveProcess)
		if modeless(ctx, d, err) {
			a.occupied = a.occupied[:len(a.occupied)-1]
			return nil
		}
		if err != nil {
			return fmt.Errorf("set the compute mode of %s: %w", d, err)
		}
	}
	return nil
}

// confirm makes sure that the mode is still what it was set to. A driver that
// nothing keeps awake forgets it; now the server does.
func (a *attempt) confirm(ctx context.Context, d Device) error {
	mode, err := a.modes.ComputeMode(ctx, d.PCIAddress, d.UUID)
	if err == nil && mode == gpu.ComputeDefault {
		klog.FromContext(ctx).Info("The compute mode went back while the MPS session started, it is set again",
			"session", a.session.ID, "pciAddress", d.PCIAddress, "uuid", d.UUID)
		mode, err = gpu.ComputeExclusiveProcess, a.modes.SetComputeMode(ctx, d.PCIAddress, d.UUID, gpu.ComputeExclusiveProcess)
	}
	if err != nil {
		return fmt.Errorf("confirm the compute mode of %s: %w", d, err)
	}
	if mode != gpu.ComputeExclusiveProcess {
		return fmt.Errorf("%s: somebody set the compute mode to %s meanwhile", d, mode)
	}
	return nil
}

// undo leaves the session that was before, if there was one. It has clients, so it
// goes on with the limits that it had, and the modes of its devices stay even where
// this attempt had to set them. No other device stays occupied.
func (a *attempt) undo(ctx context.Context) error {
	if a.asked {
		if err := a.restore(ctx); err != nil {
			return fmt.Errorf("%w; the compute modes stay as they are", err)
		}
	}
	return a.release(ctx, slices.DeleteFunc(slices.Clone(a.occupied), a.had))
}

func (a *attempt) restore(ctx context.Context) error {
	if a.before == nil || !served(a.before) {
		a.before = nil
		return supervised(a.supervisor.Stop(ctx, a.session.ID))
	}
	sessions, err := a.Sessions(ctx)
	if err != nil {
		return err
	}
	switch now, ok := sessions[a.session.ID]; {
	case !ok:
		// It was about to be removed when this attempt began.
		a.before = nil
		return nil
	case !a.unknown && reflect.DeepEqual(now.Spec, a.before.Spec):
		return nil
	}
	// The supervisor takes one call about a session after the other, so what it may
	// still be doing is over when it answers this one.
	if _, err = a.supervisor.Ensure(ctx, a.before.Spec); err == nil {
		return nil
	}
	if ctx.Err() == nil && !errors.Is(err, mps.ErrUnavailable) {
		// That it does not run may have other reasons.
		if now, err := a.Sessions(ctx); err == nil && reflect.DeepEqual(now[a.session.ID].Spec, a.before.Spec) {
			return nil
		}
	}
	return supervised(err)
}

// served tells whether a session has ever had clients. One that has not is what is
// left of a start that was given up, or of a session, and nobody's.
func served(s *mps.Status) bool {
	return s.Phase == mps.Running || s.Phase == mps.Faulted || len(s.Servers) > 0 || s.Losses > 0
}

// had tells whether the session has run on the device before this attempt.
func (a *attempt) had(d Device) bool {
	return a.before != nil && slices.Contains(a.before.Spec.Devices, d.UUID)
}

// release lets all processes use the devices. It goes on after one that fails.
func (m *Manager) release(ctx context.Context, devices []Device) error {
	var errs []error
	for _, d := range devices {
		mode, err := m.modes.ComputeMode(ctx, d.PCIAddress, d.UUID)
		if err == nil && mode == gpu.ComputeExclusiveProcess {
			err = m.modes.SetComputeMode(ctx, d.PCIAddress, d.UUID, gpu.ComputeDefault)
		}
		switch {
		case err == nil || modeless(ctx, d, err):
		case errors.Is(err, gpu.ErrNotFound):
			klog.FromContext(ctx).V(2).Info("The device is gone, and its compute mode with it", "pciAddress", d.PCIAddress, "uuid", d.UUID)
		default:
			errs = append(errs, fmt.Errorf("set the compute mode of %s back to %s: %w", d, gpu.ComputeDefault, err))
		}
	}
	return errors.Join(errs...)
}

// modeless tells from an error whether the device is a MIG device without a mode
// of its own. Its clients are then kept in the session by nothing but what their
// containers are given.
func modeless(ctx context.Context, d Device, err error) bool {
	if !errors.Is(err, gpu.ErrNotSupported) || !d.partition() {
		return false
	}
	klog.FromContext(ctx).V(4).Info("The MIG device has no compute mode", "pciAddress", d.PCIAddress, "uuid", d.UUID, "reason", err)
	return true
}

func (s Session) spec() mps.Spec {
	spec := mps.Spec{
		ID:               s.ID,
		ThreadPercentage: s.Limits.ThreadPercentage,
		Memory:           s.Limits.MemoryBytes,
		MultiUser:        s.MultiUser,
	}
	for _, d := range s.Devices {
		spec.Devices = append(spec.Devices, d.UUID)
	}
	return spec
}
