// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
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

const defaultCommandLimit = 10 * time.Second

// Manager shares the devices of one node.
type Manager struct {
	options Options
	execute func(ctx context.Context, program host.Program, args []string) (string, error)
	// trusted says of nvidia-smi whether it does what it says, by the UUID of the GPU. Starting it is nearly all of the time that a
	// time slice takes, so that what it has set is read back only until that was right once, and again after a failure. Once it has
	// set something else it is false for good.
	trusted sync.Map
}

// New returns a Manager. It does nothing to the devices yet.
func New(o Options) *Manager {
	o.CommandLimit = cmp.Or(o.CommandLimit, defaultCommandLimit)
	return &Manager{options: o, execute: execute}
}

// Sessions returns the sessions of the node by ID. The error wraps ErrNoSupervisor: nobody
// knows of sessions but the supervisor.
func (m *Manager) Sessions(ctx context.Context) (map[string]mps.Status, error) {
	list, err := m.options.Supervisor.List(ctx)
	if err != nil && !errors.Is(err, ErrNoSupervisor) {
		err = fmt.Errorf("%w: %w", ErrNoSupervisor, err)
	}
	if err != nil {
		return nil, fmt.Errorf("list MPS sessions: %w", err)
	}
	sessions := make(map[string]mps.Status, len(list))
	for _, status := range list {
		sessions[status.Spec.ID] = status
	}
	return sessions, nil
}
