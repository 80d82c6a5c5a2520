// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Make makes a partition where nothing is, completely or not at all. With dynamic (gpu.MIG.Dynamic) it turns MIG mode on
// where that is needed. It is for those who keep no records.
//
// The error wraps ErrForeign when there is an instance at the address, and gpu.ErrNoRoom when another one overlaps it.
func (l *Lifecycle) Make(ctx context.Context, a Address, dynamic bool) (Live, error) {
	state, err := l.State(ctx, a.PCIAddress)
	if err != nil {
		return Live{}, err
	}
	switch there := Instance(state, a); {
	case there != nil:
		return Live{}, fmt.Errorf("create a partition with %s: GPU instance %d is there already: %w", a, there.ID, ErrForeign)
	case state.Enabled:
	case !dynamic:
		return Live{}, fmt.Errorf("create a partition with %s: MIG mode is off, and on this GPU only an administrator changes it: %w", a, gpu.ErrNotSupported)
	default:
		if err := l.SetMode(ctx, a.PCIAddress, true); err != nil {
			return Live{}, err
		}
	}
	id, err := l.CreateInstance(ctx, a)
	if err == nil {
		var made Live
		if made, err = l.CreateCompute(ctx, a.PCIAddress, id); err == nil {
			return made, nil
		}
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	var left error
	if refused := (*RefusedError)(nil); !errors.As(err, &refused) {
		left = l.removeInstance(undo, a, id)
	}
	if left = errors.Join(left, l.leave(undo, a.PCIAddress, dynamic)); left != nil {
		err = errors.Join(err, fmt.Errorf("undo: %w", left))
	}
	return Live{}, err
}

// Remove destroys the partition at an address, whole or not, and turns MIG mode off where dynamic allows it and no instance
// is left; that it stays on is no failure, unless the call has not returned. None is a success, and so is one that somebody
// has divided, which is not the caller's.
//
// While a process uses the partition Remove tries again for about seven seconds within ctx, because a process that was
// just killed may take that long to end. Then the error wraps gpu.ErrInUse and names who has it in use.
func (l *Lifecycle) Remove(ctx context.Context, a Address, dynamic bool) error {
	for attempt := 0; ; attempt++ {
		err := l.removeInstance(ctx, a, anyID)
		if err == nil {
			return l.leave(ctx, a.PCIAddress, dynamic)
		}
		if !errors.Is(err, gpu.ErrInUse) || attempt == len(pauses) || l.wait(ctx, pauses[attempt]) != nil {
			return fmt.Errorf("destroy the partition with %s: %w", a, err)
		}
	}
}

// undoTime bounds what is undone after a failure, which the caller's deadline may have caused.
const undoTime = 15 * time.Second

const anyID = -1

// removeInstance destroys the GPU instance at the address, if it has this ID.
func (l *Lifecycle) removeInstance(ctx context.Context, a Address, id int) error {
	state, err := l.State(ctx, a.PCIAddress)
	if err != nil {
		return err
	}
	i := Instance(state, a)
	if i == nil || len(i.Compute) > 1 || id != anyID && i.ID != id {
		return nil
	}
	for _, c := range i.Compute {
		if err := l.DestroyCompute(ctx, a.PCIAddress, i.ID, c.ID); err != nil {
			return err
		}
	}
	return l.DestroyInstance(ctx, a.PCIAddress, i.ID)
}

// leave turns MIG mode off when the last instance is gone.
func (l *Lifecycle) leave(ctx context.Context, pciAddress string, dynamic bool) error {
	if !dynamic {
		return nil
	}
	state, err := l.State(ctx, pciAddress)
	if err != nil || !state.Enabled || len(state.Instances) > 0 {
		return err
	}
	if err = l.SetMode(ctx, pciAddress, false); errors.Is(err, gpu.ErrHung) {
		return err
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "MIG mode stays on, although no instance is left", "pciAddress", pciAddress)
	}
	return nil
}

// pauses are the delays between attempts on an instance that is in use.
var pauses = []time.Duration{
	100 * time.Millisecond,
	200 * time.Millisecond,
	400 * time.Millisecond,
	800 * time.Millisecond,
	1600 * time.Millisecond,
	2 * time.Second,
	2 * time.Second,
}
