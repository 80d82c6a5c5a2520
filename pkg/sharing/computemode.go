// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// resetModes sets devices that are in EXCLUSIVE_PROCESS to DEFAULT. It goes on after
// one that fails. A device that is gone is no failure.
func (m *Manager) resetModes(ctx context.Context, devices []Device) error {
	var errs []error
	for _, d := range devices {
		mode, err := m.modes.ComputeMode(ctx, d.PCIAddress, d.UUID)
		if err == nil && mode == gpu.ComputeExclusiveProcess {
			err = m.modes.SetComputeMode(ctx, d.PCIAddress, d.UUID, gpu.ComputeDefault)
		}
		switch {
		case err == nil || lacksMode(ctx, d, err):
		case errors.Is(err, gpu.ErrNotFound):
			klog.FromContext(ctx).V(2).Info("The device is gone, and its compute mode with it", "pciAddress", d.PCIAddress, "uuid", d.UUID)
		default:
			errs = append(errs, fmt.Errorf("set the compute mode of %s back to %s: %w", d, gpu.ComputeDefault, err))
		}
	}
	return errors.Join(errs...)
}

// lacksMode reports whether err says that the device is a MIG device without a
// compute mode. Then nothing but the environment of their containers keeps clients in
// the session.
func lacksMode(ctx context.Context, d Device, err error) bool {
	if !errors.Is(err, gpu.ErrNotSupported) || !d.isPartition() {
		return false
	}
	klog.FromContext(ctx).V(4).Info("The MIG device has no compute mode", "pciAddress", d.PCIAddress, "uuid", d.UUID, "reason", err)
	return true
}
