// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// wholeGPU means all instances in place of an instance id.
const wholeGPU = -1

// ErrDivided means that a GPU cannot be used undivided because there are instances on
// it. It wraps gpu.ErrInUse, but waiting does not help.
var ErrDivided = fmt.Errorf("it is partitioned: %w", gpu.ErrInUse)

// EnsureWhole disables MIG mode, so that the GPU can be used undivided. It never
// destroys an instance: if there are any, it fails and names them. It is only for GPUs
// that support MIG; if one reports that it does not, that is an error.
func (l *Lifecycle) EnsureWhole(ctx context.Context, pciAddress string, dynamic bool) error {
	if err := l.ensureWhole(ctx, pciAddress, dynamic); err != nil {
		return fmt.Errorf("use GPU %s undivided: %w", pciAddress, err)
	}
	return nil
}

func (l *Lifecycle) ensureWhole(ctx context.Context, pciAddress string, dynamic bool) error {
	state, err := l.hw.MIGState(ctx, pciAddress)
	if err != nil {
		return err
	}
	if len(state.Instances) > 0 {
		return fmt.Errorf("there is %s: %w", names(state.Instances), ErrDivided)
	}
	if !state.Enabled {
		return nil
	}
	if !dynamic {
		return fmt.Errorf("MIG mode is on, and on this GPU only an administrator changes it: %w", gpu.ErrNotSupported)
	}
	_, err = l.switchMode(ctx, pciAddress, false)
	return err
}

// FabricJoined returns an error that wraps gpu.ErrFabricPending while an undivided GPU is not registered
// with its NVLink fabric: the driver takes one with partitions out of it, and registers it again after
// the last one is gone. Where that is not known the GPU is used: most have no fabric.
func (l *Lifecycle) FabricJoined(ctx context.Context, pciAddress string) error {
	pending, err := l.hw.FabricPending(ctx, pciAddress)
	switch {
	case errors.Is(err, gpu.ErrHung) || ctx.Err() != nil:
		return fmt.Errorf("use GPU %s undivided: %w", pciAddress, err)
	case err != nil:
		klog.FromContext(ctx).Error(err, "Whether a GPU is registered with the NVLink fabric is unknown", "pciAddress", pciAddress)
	case pending != "":
		return fmt.Errorf("use GPU %s undivided: CUDA programs would not start: it is %w (%s)", pciAddress, gpu.ErrFabricPending, pending)
	}
	return nil
}

// ensureEnabled enables MIG mode if necessary and returns the state of the GPU.
func (l *Lifecycle) ensureEnabled(ctx context.Context, pciAddress string, dynamic bool) (gpu.MIGState, error) {
	state, err := l.hw.MIGState(ctx, pciAddress)
	if err != nil || state.Enabled {
		return state, err
	}
	if !dynamic {
		return state, fmt.Errorf("MIG mode is off, and on this GPU only an administrator changes it: %w", gpu.ErrNotSupported)
	}
	state, err = l.switchMode(ctx, pciAddress, true)
	if err == nil {
		return state, nil
	}
	// A change that did not take effect may be pending until the next reset.
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if undoErr := l.hw.SetMIGMode(cleanup, pciAddress, false); undoErr != nil {
		return state, errors.Join(err, fmt.Errorf("undo: %w", undoErr))
	}
	return state, err
}

// switchMode sets MIG mode and returns the state after it.
func (l *Lifecycle) switchMode(ctx context.Context, pciAddress string, enabled bool) (gpu.MIGState, error) {
	word := "off"
	if enabled {
		word = "on"
	}
	err := l.hw.SetMIGMode(ctx, pciAddress, enabled)
	if errors.Is(err, gpu.ErrInUse) {
		err = l.withHolders(ctx, pciAddress, wholeGPU, err)
	}
	if err != nil {
		return gpu.MIGState{}, fmt.Errorf("turn MIG mode %s: %w", word, err)
	}
	state, err := l.hw.MIGState(ctx, pciAddress)
	if err != nil {
		return state, err
	}
	if state.Enabled != enabled {
		return state, fmt.Errorf("turn MIG mode %s: the driver reports success and the mode has not changed", word)
	}
	klog.FromContext(ctx).Info("MIG mode switched", "pciAddress", pciAddress, "mode", word)
	return state, nil
}
