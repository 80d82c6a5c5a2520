// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/partage-dev/partage/pkg/call"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
)

// Modes reads and sets the compute modes of GPUs and MIG devices.
type Modes interface {
	// ComputeMode and SetComputeMode are about the GPU at the address, or about
	// one of its MIG devices. The error wraps gpu.ErrNotFound if the device with
	// this UUID is gone.
	ComputeMode(ctx context.Context, pciAddress, uuid string) (gpu.ComputeMode, error)
	SetComputeMode(ctx context.Context, pciAddress, uuid string, mode gpu.ComputeMode) error
}

// Supervisor runs MPS sessions. Its errors name the session or the supervisor. They
// wrap mps.ErrUnavailable if it does not answer; then the change may have been made or
// not.
type Supervisor interface {
	// Ensure makes a session run as specified.
	Ensure(ctx context.Context, spec mps.Spec) (mps.Status, error)
	// Stop succeeds if there is no such session.
	Stop(ctx context.Context, id string) error
	List(ctx context.Context) ([]mps.Status, error)
}

// Options configure a Manager.
type Options struct {
	// Roots locate the driver's programs.
	Roots      host.Roots
	Modes      Modes
	Supervisor Supervisor
	// Calls are the queues of the process, or nil for some of the caller's own.
	Calls *call.Queues
	// CommandLimit is how long nvidia-smi may take. 0 means 10 s.
	CommandLimit time.Duration
}

const (
	defaultCommandLimit = 10 * time.Second
	// rollBackLimit is how long Start may take to roll back. A session without
	// clients stops within seconds.
	rollBackLimit = 30 * time.Second
)

// Manager shares the devices of one node.
type Manager struct {
	roots        host.Roots
	modes        Modes
	supervisor   Supervisor
	calls        *call.Queues
	commandLimit time.Duration
	execute      func(ctx context.Context, program host.Program, args []string) (string, error)
	tool         trust
}

// New returns a Manager. It does nothing to the devices yet.
func New(o Options) *Manager {
	return &Manager{
		roots:        o.Roots,
		modes:        o.Modes,
		supervisor:   o.Supervisor,
		calls:        o.Calls,
		commandLimit: cmp.Or(o.CommandLimit, defaultCommandLimit),
		execute:      execute,
	}
}

// Sessions returns the sessions of the node by ID. The error wraps ErrNoSupervisor if
// the supervisor does not answer.
func (m *Manager) Sessions(ctx context.Context) (map[string]mps.Status, error) {
	list, err := m.supervisor.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list MPS sessions: %w", wrapUnavailable(err))
	}
	sessions := make(map[string]mps.Status, len(list))
	for _, status := range list {
		sessions[status.Spec.ID] = status
	}
	return sessions, nil
}

// Start makes a session run with these limits, or changes those of the running one,
// completely or not at all. A compute mode other than DEFAULT on a device that was not
// in the session is an error; with adopt, EXCLUSIVE_PROCESS is taken for the work of
// an earlier call.
//
// After an error the session is as it was before, or there is none and the devices
// have their compute mode back. If that failed as well, the error wraps ErrLeft, and
// Stop completes it.
func (m *Manager) Start(ctx context.Context, s Session, adopt bool) (Live, error) {
	sessions, err := m.Sessions(ctx)
	if err != nil {
		return Live{}, err
	}
	call := &starter{Manager: m, session: s, adopt: adopt}
	if status, ok := sessions[s.ID]; ok {
		call.before = &status
	}
	live, err := call.start(ctx)
	if err == nil {
		return live, nil
	}
	rollBack, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollBackLimit)
	defer cancel()
	if rollBackErr := call.rollBack(rollBack); rollBackErr != nil {
		err = errors.Join(err, fmt.Errorf("undo the start of MPS session %s: %w: %w", s.ID, ErrLeft, rollBackErr))
	}
	return Live{}, err
}

// Stop ends a session and then sets the compute mode of its devices back. It succeeds
// if there is no session, or a device is gone. While the session may still run, the
// compute modes stay, so that nothing runs beside it.
func (m *Manager) Stop(ctx context.Context, s Session) error {
	if err := m.supervisor.Stop(ctx, s.ID); err != nil {
		return wrapUnavailable(err)
	}
	return m.resetModes(ctx, s.Devices)
}

// wrapUnavailable makes an error that wraps mps.ErrUnavailable wrap ErrNoSupervisor
// too. Its text stays.
func wrapUnavailable(err error) error {
	if errors.Is(err, mps.ErrUnavailable) {
		return noSupervisorError{err}
	}
	return err
}

type noSupervisorError struct{ error }

func (e noSupervisorError) Unwrap() []error { return []error{ErrNoSupervisor, e.error} }
