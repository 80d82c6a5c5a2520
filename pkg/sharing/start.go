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
	"github.com/partage-dev/partage/pkg/policy"
)

// starter is one call of Start, with what must be rolled back if it fails.
type starter struct {
	*Manager
	session Session
	adopt   bool
	before  *mps.Status // the session before the call; nil without one

	// exclusive are the devices whose compute mode is EXCLUSIVE_PROCESS for the
	// session, or may have become that.
	exclusive []Device
	// ensured: the supervisor was asked to run the session.
	ensured bool
	// unanswered: the supervisor has not answered that, and may still be at work.
	unanswered bool
}

// start sets EXCLUSIVE_PROCESS before the session runs and while it does, so that
// only the session's server can use the devices: in mode DEFAULT a client that does
// not reach its daemon runs without limits.
func (s *starter) start(ctx context.Context) (Live, error) {
	for _, d := range s.session.Devices {
		if err := s.setExclusive(ctx, d); err != nil {
			return Live{}, err
		}
	}
	s.ensured = true
	status, err := s.supervisor.Ensure(ctx, s.session.spec())
	if err != nil {
		s.unanswered = ctx.Err() != nil || errors.Is(err, mps.ErrUnavailable)
		return Live{}, wrapUnavailable(err)
	}
	if status.Phase != mps.Running {
		return Live{}, fmt.Errorf("MPS session %s is %s and not %s: %s", s.session.ID, status.Phase, mps.Running, status.Message)
	}
	if want := s.session.spec().ClientPriority; want != "" && status.Spec.ClientPriority != want {
		return Live{}, fmt.Errorf("MPS session %s: the MPS supervisor of this node is of an earlier version, which cannot set the client priority %s; "+
			"delete its pod when no claims use MPS, so that it is replaced", s.session.ID, want)
	}
	for _, d := range s.exclusive {
		if err := s.verifyExclusive(ctx, d); err != nil {
			return Live{}, err
		}
	}
	return Live{PipeDir: status.PipeDir, ShmDir: status.ShmDir, Losses: status.Losses, Kills: status.Kills}, nil
}

// setExclusive sets a device's compute mode to EXCLUSIVE_PROCESS, if it has one.
func (s *starter) setExclusive(ctx context.Context, d Device) error {
	mode, err := s.modes.ComputeMode(ctx, d.PCIAddress, d.UUID)
	switch {
	case lacksMode(ctx, d, err):
		return nil
	case err != nil:
		return fmt.Errorf("read the compute mode of %s: %w", d, err)
	case mode == gpu.ComputeExclusiveProcess && (s.adopt || s.had(d)):
		s.exclusive = append(s.exclusive, d)
		return nil
	case mode != gpu.ComputeDefault:
		return fmt.Errorf("%s: compute mode is %s and was not set by this driver; set it back with nvidia-smi -i %s -c %s",
			d, mode, d.UUID, gpu.ComputeDefault)
	}
	// Listed before the call, which may have an effect even if it fails.
	s.exclusive = append(s.exclusive, d)
	err = s.modes.SetComputeMode(ctx, d.PCIAddress, d.UUID, gpu.ComputeExclusiveProcess)
	if lacksMode(ctx, d, err) {
		s.exclusive = s.exclusive[:len(s.exclusive)-1]
		return nil
	}
	if err != nil {
		return fmt.Errorf("set the compute mode of %s: %w", d, err)
	}
	return nil
}

// verifyExclusive makes sure that a device's compute mode is still EXCLUSIVE_PROCESS.
// Without persistence mode a driver forgets the mode while no process has the GPU
// open; from now on the server has.
func (s *starter) verifyExclusive(ctx context.Context, d Device) error {
	mode, err := s.modes.ComputeMode(ctx, d.PCIAddress, d.UUID)
	if err == nil && mode == gpu.ComputeDefault {
		klog.FromContext(ctx).Info("The compute mode was reset while the MPS session started, setting it again",
			"session", s.session.ID, "pciAddress", d.PCIAddress, "uuid", d.UUID)
		mode, err = gpu.ComputeExclusiveProcess, s.modes.SetComputeMode(ctx, d.PCIAddress, d.UUID, gpu.ComputeExclusiveProcess)
	}
	if err != nil {
		return fmt.Errorf("verify the compute mode of %s: %w", d, err)
	}
	if mode != gpu.ComputeExclusiveProcess {
		return fmt.Errorf("%s: somebody set the compute mode to %s meanwhile", d, mode)
	}
	return nil
}

// rollBack restores the session that was there before, if there was one. That one has
// clients, so it keeps its old limits and the modes of its devices, even where this
// call had to set them. All other devices get their mode back.
func (s *starter) rollBack(ctx context.Context) error {
	if s.ensured {
		if err := s.restoreSession(ctx); err != nil {
			return fmt.Errorf("%w; the compute modes stay as they are", err)
		}
	}
	return s.resetModes(ctx, slices.DeleteFunc(slices.Clone(s.exclusive), s.had))
}

func (s *starter) restoreSession(ctx context.Context) error {
	if s.before == nil || !hadClients(s.before) {
		s.before = nil
		return wrapUnavailable(s.supervisor.Stop(ctx, s.session.ID))
	}
	sessions, err := s.Sessions(ctx)
	if err != nil {
		return err
	}
	switch now, ok := sessions[s.session.ID]; {
	case !ok:
		// It was being removed when this call began.
		s.before = nil
		return nil
	case !s.unanswered && reflect.DeepEqual(now.Spec, s.before.Spec):
		return nil
	}
	// The supervisor works on one call about a session at a time, so when it answers
	// this one, it is done with the last.
	if _, err = s.supervisor.Ensure(ctx, s.before.Spec); err == nil {
		return nil
	}
	if ctx.Err() == nil && !errors.Is(err, mps.ErrUnavailable) {
		// The session may have its old limits, and not run for another reason.
		if now, err := s.Sessions(ctx); err == nil && reflect.DeepEqual(now[s.session.ID].Spec, s.before.Spec) {
			return nil
		}
	}
	return wrapUnavailable(err)
}

// hadClients reports whether a session may ever have had clients. One that has not is
// the remnant of a canceled start, or of a removal, and belongs to no claim.
func hadClients(s *mps.Status) bool {
	return s.Phase == mps.Running || s.Phase == mps.Faulted || len(s.Servers) > 0 || s.Losses > 0
}

// had reports whether the session ran on the device before this call.
func (s *starter) had(d Device) bool {
	return s.before != nil && slices.Contains(s.before.Spec.Devices, d.UUID)
}

func (s Session) spec() mps.Spec {
	spec := mps.Spec{
		ID:               s.ID,
		ThreadPercentage: s.Limits.ThreadPercentage,
		Memory:           s.Limits.MemoryBytes,
		MultiUser:        s.MultiUser,
		ClientPriority:   mps.ClientPriority(s.ClientPriority),
	}
	if s.OnClientKilled == policy.KilledRestart {
		spec.OnClientKilled = mps.RestartServer
	}
	for _, d := range s.Devices {
		spec.Devices = append(spec.Devices, d.UUID)
	}
	return spec
}
