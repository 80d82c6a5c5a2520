// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
)

// Modes are the compute modes of GPUs and MIG devices.
type Modes interface {
	// ComputeMode and SetComputeMode are about the GPU at the address, or about
	// one of its MIG devices. The error wraps gpu.ErrNotFound when the one with
	// this UUID is gone.
	ComputeMode(ctx context.Context, pciAddress, uuid string) (gpu.ComputeMode, error)
	SetComputeMode(ctx context.Context, pciAddress, uuid string, mode gpu.ComputeMode) error
}

// Supervisor runs MPS sessions. Its errors name the session, or the supervisor:
// they wrap mps.ErrUnavailable when it does not answer, and then a change may have
// been made or not.
type Supervisor interface {
	// Ensure makes a session run as it is specified.
	Ensure(ctx context.Context, spec mps.Spec) (mps.Status, error)
	// Stop succeeds when there is no such session.
	Stop(ctx context.Context, id string) error
	List(ctx context.Context) ([]mps.Status, error)
}

// Options are what a Manager works with.
type Options struct {
	// Roots say where the driver's programs are.
	Roots      host.Roots
	Modes      Modes
	Supervisor Supervisor
	// CommandLimit is how long nvidia-smi may take. 0 means 10 s.
	CommandLimit time.Duration
}

const (
	defaultCommandLimit = 10 * time.Second
	// undoLimit is how long Start may take to undo what it did. A session that has
	// no clients stops within seconds.
	undoLimit = 30 * time.Second
)

// Manager shares the devices of one node.
type Manager struct {
	roots        host.Roots
	modes        Modes
	supervisor   Supervisor
	commandLimit time.Duration
	execute      func(ctx context.Context, program host.Program, args []string) (string, error)
}

// New makes a manager and touches nothing yet.
func New(o Options) *Manager {
	return &Manager{
		roots:        o.Roots,
		modes:        o.Modes,
		supervisor:   o.Supervisor,
		commandLimit: cmp.Or(o.CommandLimit, defaultCommandLimit),
		execute:      execute,
	}
}

// Sessions are those of the node by ID. The error wraps ErrNoSupervisor when it
// cannot be known.
func (m *Manager) Sessions(ctx context.Context) (map[string]mps.Status, error) {
	list, err := m.supervisor.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list MPS sessions: %w", supervised(err))
	}
	sessions := make(map[string]mps.Status, len(list))
	for _, status := range list {
		sessions[status.Spec.ID] = status
	}
	return sessions, nil
}

// Start makes a session run with these limits, or brings the one that runs to
// them, completely or not at all. A compute mode that somebody else set is an
// error, unless adopt says that this driver may have set it.
//
// After an error there is the session that was there before, as it was, or none
// and no device that waits for one. When undoing has failed as well the error wraps
// ErrLeft, and Stop finishes it.
func (m *Manager) Start(ctx context.Context, s Session, adopt bool) (Live, error) {
	sessions, err := m.Sessions(ctx)
	if err != nil {
		return Live{}, err
	}
	a := &attempt{Manager: m, session: s, adopt: adopt}
	if status, ok := sessions[s.ID]; ok {
		a.before = &status
	}
	live, err := a.start(ctx)
	if err == nil {
		return live, nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	if failed := a.undo(undo); failed != nil {
		err = errors.Join(err, fmt.Errorf("undo the start of MPS session %s: %w: %w", s.ID, ErrLeft, failed))
	}
	return Live{}, err
}

// Stop ends a session and then lets all processes use its devices again. It
// succeeds when there is no session, or a device is gone. While the session may
// still run, the compute modes stay, so that nothing runs beside it.
func (m *Manager) Stop(ctx context.Context, s Session) error {
	if err := m.supervisor.Stop(ctx, s.ID); err != nil {
		return supervised(err)
	}
	return m.release(ctx, s.Devices)
}

// supervised lets an error of the supervisor be ErrNoSupervisor where it is that
// there is no answer. Its text stays.
func supervised(err error) error {
	if errors.Is(err, mps.ErrUnavailable) {
		return unanswered{err}
	}
	return err
}

type unanswered struct{ error }

func (u unanswered) Unwrap() []error { return []error{ErrNoSupervisor, u.error} }
