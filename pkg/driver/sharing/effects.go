// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
)

// The methods here are single effects. What is to be done when is for their caller to decide.

// Mode returns the compute mode of a whole GPU. Partitions have none: nothing but the environment of their containers
// keeps clients in a session.
func (m *Manager) Mode(ctx context.Context, d Device) (gpu.ComputeMode, error) {
	mode, err := m.options.Modes.ComputeMode(ctx, d.PCIAddress, d.UUID)
	if err != nil {
		return "", fmt.Errorf("read the compute mode of %s: %w", d, err)
	}
	return mode, nil
}

// SetExclusive sets the compute mode of a whole GPU to EXCLUSIVE_PROCESS before a session is started on it, or back to
// DEFAULT after its end: in mode DEFAULT a client that does not reach its daemon runs without limits. A GPU that is gone
// has its mode back.
func (m *Manager) SetExclusive(ctx context.Context, d Device, exclusive bool) error {
	want := gpu.ComputeDefault
	if exclusive {
		want = gpu.ComputeExclusiveProcess
	}
	err := m.options.Modes.SetComputeMode(ctx, d.PCIAddress, d.UUID, want)
	if errors.Is(err, gpu.ErrNotFound) && !exclusive {
		klog.FromContext(ctx).V(2).Info("The GPU is gone, and its compute mode with it", "pciAddress", d.PCIAddress, "uuid", d.UUID)
		return nil
	}
	if err != nil {
		return fmt.Errorf("set the compute mode of %s to %s: %w", d, want, err)
	}
	return nil
}

// keepExclusive makes sure that the compute mode of a GPU is still EXCLUSIVE_PROCESS. Without persistence mode a driver
// forgets the mode while no process has the GPU open; from now on the session's server has.
func (m *Manager) keepExclusive(ctx context.Context, d Device) error {
	mode, err := m.Mode(ctx, d)
	switch {
	case err != nil || mode == gpu.ComputeExclusiveProcess:
		return err
	case mode != gpu.ComputeDefault:
		return fmt.Errorf("%s: somebody has set the compute mode to %s meanwhile", d, mode)
	}
	klog.FromContext(ctx).Info("The compute mode was reset while the MPS session started, setting it again", "pciAddress", d.PCIAddress, "uuid", d.UUID)
	return m.SetExclusive(ctx, d, true)
}

// unavailable is CUDA's word for a GPU that another process has, in what the log of the daemon says.
const unavailable = "CUDA_ERROR_DEVICE_UNAVAILABLE"

// Ensure makes a session run on these devices, or changes the limits of the running one. The compute mode of whole GPUs
// among them has to be EXCLUSIVE_PROCESS before, see SetExclusive. After an error the session may run or not.
func (m *Manager) Ensure(ctx context.Context, spec mps.Spec, devices []Device) (mps.Status, error) {
	status, err := m.options.Supervisor.Ensure(ctx, spec)
	switch {
	case err != nil && strings.Contains(err.Error(), unavailable):
		// In mode EXCLUSIVE_PROCESS a server does not start beside another process.
		return status, fmt.Errorf("%w: %w", gpu.ErrInUse, err)
	case err != nil:
		return status, err
	case status.Phase != mps.Running:
		return status, fmt.Errorf("MPS session %s is %s and not %s: %s", spec.ID, status.Phase, mps.Running, status.Message)
	}
	for _, d := range devices {
		if d.isPartition() {
			continue
		}
		if err := m.keepExclusive(ctx, d); err != nil {
			return status, err
		}
	}
	return status, nil
}

// End ends a session. It succeeds if there is none.
func (m *Manager) End(ctx context.Context, id string) error {
	return m.options.Supervisor.Stop(ctx, id)
}
