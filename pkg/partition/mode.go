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

// wholeGPU stands for all instances where an instance id is expected.
const wholeGPU = -1

// ErrDivided says that a GPU cannot be used undivided while somebody's instances
// are on it. It wraps gpu.ErrInUse, but waiting does not help.
var ErrDivided = fmt.Errorf("it is partitioned: %w", gpu.ErrInUse)

// EnsureWhole makes the GPU usable undivided: MIG mode off. It never removes
// an instance; where there are some it fails and names them. It is for GPUs that can
// be divided: one that says that it cannot is in trouble.
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
		return fmt.Errorf("there is %s: %w", describe(state.Instances), ErrDivided)
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

// enabled returns the state of a GPU whose MIG mode is on, after it turned it
// on if need be.
func (l *Lifecycle) enabled(ctx context.Context, pciAddress string, dynamic bool) (gpu.MIGState, error) {
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
	// A change that did not take effect may be pending, and would come with
	// the next reset, unasked.
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if undoErr := l.hw.SetMIGMode(cleanup, pciAddress, false); undoErr != nil {
		return state, errors.Join(err, fmt.Errorf("undo: %w", undoErr))
	}
	return state, err
}

// switchMode sets the mode and returns the state read afterwards.
func (l *Lifecycle) switchMode(ctx context.Context, pciAddress string, enabled bool) (gpu.MIGState, error) {
	word := "off"
	if enabled {
		word = "on"
	}
	err := l.hw.SetMIGMode(ctx, pciAddress, enabled)
	if errors.Is(err, gpu.ErrInUse) {
		err = l.nameHolder(ctx, pciAddress, wholeGPU, err)
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
