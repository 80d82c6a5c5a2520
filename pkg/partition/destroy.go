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

// Destroy destroys the partition at the address and nothing else. It succeeds if there
// is none, or if the instance there is foreign: divided into several compute
// instances, or with another UUID than uuid. An empty uuid accepts any. It is an error
// if the GPU reports that it has no MIG, since a partition was created there. Destroy
// disables MIG mode when the last instance of a dynamic GPU is gone. If only that
// fails it is logged, unless the call has not returned.
//
// While a process uses the partition Destroy retries for about seven seconds within
// ctx, because a process that was just killed may take that long to end. Then the
// error wraps gpu.ErrInUse and names who has it in use.
func (l *Lifecycle) Destroy(ctx context.Context, a Address, uuid string, dynamic bool) error {
	if err := l.destroy(ctx, a, withUUID(uuid), dynamic); err != nil {
		return fmt.Errorf("destroy the partition with %s: %w", a, err)
	}
	return nil
}

func (l *Lifecycle) destroy(ctx context.Context, a Address, ours check, dynamic bool) error {
	state, err := l.hw.MIGState(ctx, a.PCIAddress)
	if err != nil {
		return err
	}
	if state, err = l.removeInstance(ctx, a, ours, state); err != nil {
		return err
	}
	if dynamic && state.Enabled && len(state.Instances) == 0 {
		_, err := l.switchMode(ctx, a.PCIAddress, false)
		if errors.Is(err, gpu.ErrHung) {
			// The caller has to keep the GPU locked.
			return err
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "MIG mode stays enabled, although no instance is left", "pciAddress", a.PCIAddress)
		}
	}
	return nil
}

// removeInstance destroys the GPU instance at the address if it is ours, retries while
// it is in use, and returns the state after it. Every attempt checks again what is at
// the address, since the instance may have been replaced.
func (l *Lifecycle) removeInstance(ctx context.Context, a Address, ours check, state gpu.MIGState) (gpu.MIGState, error) {
	for attempt := 0; ; attempt++ {
		instance := find(state, a)
		if instance == nil {
			return state, nil
		}
		if err := ours(*instance); err != nil {
			klog.FromContext(ctx).Info("A GPU instance at the address of a partition is not ours and stays",
				"pciAddress", a.PCIAddress, "instanceID", instance.ID, "reason", err.Error())
			return state, nil
		}
		absent, err := l.destroyInstance(ctx, a.PCIAddress, *instance)
		if err == nil {
			still := errors.New("the driver reports success and the GPU instance is still there")
			return l.checkGone(ctx, a, ours, errors.Join(append(absent, still)...))
		}
		if !errors.Is(err, gpu.ErrInUse) {
			return l.checkGone(ctx, a, ours, err)
		}
		// If there is no time for another attempt, the error says what is in use
		// rather than that the deadline was exceeded.
		if attempt == len(pauses) || l.wait(ctx, pauses[attempt]) != nil {
			return state, l.withHolders(ctx, a.PCIAddress, instance.ID, err)
		}
		if state, err = l.hw.MIGState(ctx, a.PCIAddress); err != nil {
			return state, err
		}
	}
}

// destroyInstance destroys the compute instances first, as the driver demands. If one
// is gone already that is no failure, and is returned in absent.
func (l *Lifecycle) destroyInstance(ctx context.Context, pciAddress string, instance gpu.Instance) (absent []error, err error) {
	for _, compute := range instance.Compute {
		err := l.hw.DestroyComputeInstance(ctx, pciAddress, instance.ID, compute.ID)
		if err != nil {
			err = fmt.Errorf("compute instance %d of GPU instance %d: %w", compute.ID, instance.ID, err)
		}
		if err != nil && !errors.Is(err, gpu.ErrNotFound) {
			return absent, err
		}
		absent = append(absent, err)
	}
	err = l.hw.DestroyInstance(ctx, pciAddress, instance.ID)
	if err != nil {
		err = fmt.Errorf("GPU instance %d: %w", instance.ID, err)
	}
	if err != nil && !errors.Is(err, gpu.ErrNotFound) {
		return absent, err
	}
	klog.FromContext(ctx).V(2).Info("GPU instance destroyed", "pciAddress", pciAddress, "instanceID", instance.ID)
	return append(absent, err), nil
}

// checkGone returns cause if the instance is still at the address, and the state.
func (l *Lifecycle) checkGone(ctx context.Context, a Address, ours check, cause error) (gpu.MIGState, error) {
	state, err := l.hw.MIGState(ctx, a.PCIAddress)
	if err != nil {
		return state, errors.Join(cause, err)
	}
	if instance := find(state, a); instance != nil && ours(*instance) == nil {
		return state, cause
	}
	return state, nil
}

// withHolders adds to gpu.ErrInUse who has the instance, or the GPU, in use. It asks even
// after the caller's deadline, since this is what an administrator needs to know.
func (l *Lifecycle) withHolders(ctx context.Context, pciAddress string, instanceID int, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	processes, listErr := l.hw.Processes(ctx, pciAddress)
	err = fmt.Errorf("%w, held by %s", err, l.holders.Describe(ctx, pciAddress, instanceID, processes))
	if listErr != nil {
		return fmt.Errorf("%w (which processes the driver lists is not known: %w)", err, listErr)
	}
	return err
}

// pauses are the delays between attempts on an instance that is in use, about seven
// seconds in all: long enough for a killed process to end, short enough for another
// claim on this GPU to be served in the same kubelet call.
var pauses = []time.Duration{
	100 * time.Millisecond,
	200 * time.Millisecond,
	400 * time.Millisecond,
	800 * time.Millisecond,
	1600 * time.Millisecond,
	2 * time.Second,
	2 * time.Second,
}
