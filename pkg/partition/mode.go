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
