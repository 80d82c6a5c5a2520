// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Make makes a partition where nothing is. With dynamic (gpu.MIG.Dynamic) it turns MIG mode on where that is needed. It is for
// those who keep no records; what it has begun when it fails is for Remove.
//
// The error wraps ErrForeign when there is an instance at the address, and gpu.ErrNoRoom when another one overlaps it.
func (l *Lifecycle) Make(ctx context.Context, a Address, dynamic bool) (gpu.PartitionID, error) {
	state, err := l.State(ctx, a.PCIAddress)
	if err != nil {
		return gpu.PartitionID{}, err
	}
	switch there := Instance(state, a); {
	case there != nil:
		return gpu.PartitionID{}, fmt.Errorf("create a partition with %s: GPU instance %d is there already: %w", a, there.ID, ErrForeign)
	case state.Enabled:
	case !dynamic:
		return gpu.PartitionID{}, fmt.Errorf("create a partition with %s: MIG mode is off, and on this GPU only an administrator changes it: %w", a, gpu.ErrNotSupported)
	default:
		if err := l.SetMode(ctx, a.PCIAddress, true); err != nil {
			return gpu.PartitionID{}, err
		}
	}
	id, err := l.CreateInstance(ctx, a)
	if err != nil {
		return gpu.PartitionID{}, err
	}
	return l.CreateCompute(ctx, a.PCIAddress, id)
}

const (
	// retries are the further attempts on an instance that is in use. The pauses before them double up to longestPause.
	retries                     = 7
	shortestPause, longestPause = 100 * time.Millisecond, 2 * time.Second
)

// Remove destroys the partition at an address, whole or not. None is a success, and so is one that somebody has divided, which
// is not the caller's.
//
// While a process uses the partition Remove tries again for about seven seconds within ctx, because a process that was
// just killed may take that long to end. Then the error wraps gpu.ErrInUse and names who has it in use.
func (l *Lifecycle) Remove(ctx context.Context, a Address) error {
	pause := shortestPause
	for attempt := 0; ; attempt++ {
		err := l.removeInstance(ctx, a)
		if err == nil {
			return nil
		}
		if !errors.Is(err, gpu.ErrInUse) || attempt == retries || l.wait(ctx, pause) != nil {
			return fmt.Errorf("destroy the partition with %s: %w", a, err)
		}
		pause = min(2*pause, longestPause)
	}
}

// removeInstance destroys the GPU instance at the address.
func (l *Lifecycle) removeInstance(ctx context.Context, a Address) error {
	state, err := l.State(ctx, a.PCIAddress)
	if err != nil {
		return err
	}
	i := Instance(state, a)
	if i == nil || len(i.Compute) > 1 {
		return nil
	}
	for _, c := range i.Compute {
		if err := l.DestroyCompute(ctx, a.PCIAddress, i.ID, c.ID); err != nil {
			return err
		}
	}
	return l.DestroyInstance(ctx, a.PCIAddress, i.ID)
}
