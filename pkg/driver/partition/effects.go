// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// The methods here are single effects whose outcome is read back, unless the next one would fail without it. What is to be done
// where is for their caller to decide.

// RefusedError is a call that the driver has refused: it has definitely had no effect.
type RefusedError struct{ Err error }

func (e *RefusedError) Error() string { return e.Err.Error() }

func (e *RefusedError) Unwrap() error { return e.Err }

// afterwards is for reading back what a call has done, also for a caller that has no time left. What cannot be found out in a
// moment is observed again then, before anything else is done.
func afterwards(ctx context.Context) (context.Context, context.CancelFunc) {
	until := time.Now().Add(time.Second)
	if deadline, limited := ctx.Deadline(); ctx.Err() == nil && (!limited || deadline.After(until)) {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(context.WithoutCancel(ctx), until)
}

// FabricPending returns how far the undivided GPU's registration with its NVLink fabric is, or nothing if it is done or
// there is none: the driver takes a GPU with partitions out of it, and registers it again after the last one is gone.
func (l *Lifecycle) FabricPending(ctx context.Context, pciAddress string) (string, error) {
	return l.hw.FabricPending(ctx, pciAddress)
}

// SetMode sets MIG mode, and reads it back. A change that did not take effect may be pending until the next reset of the
// GPU, and is taken back.
func (l *Lifecycle) SetMode(ctx context.Context, pciAddress string, on bool) error {
	word := "off"
	if on {
		word = "on"
	}
	wrap := func(err error) error { return fmt.Errorf("turn MIG mode of GPU %s %s: %w", pciAddress, word, err) }
	err := l.hw.SetMIGMode(ctx, pciAddress, on)
	if gpu.IsPending(err) {
		return wrap(err)
	}
	check, cancel := afterwards(ctx)
	defer cancel()
	state, checkErr := l.hw.MIGState(check, pciAddress)
	switch {
	case checkErr != nil:
		return wrap(errors.Join(err, checkErr))
	case state.Enabled == on:
		klog.FromContext(ctx).Info("MIG mode switched", "pciAddress", pciAddress, "mode", word)
		return nil
	case err == nil:
		err = errors.New("the driver reports success and the mode has not changed")
	}
	if undoErr := l.hw.SetMIGMode(check, pciAddress, !on); undoErr != nil && on {
		err = errors.Join(err, fmt.Errorf("take a change back that may be pending: %w", undoErr))
	}
	if errors.Is(err, gpu.ErrInUse) {
		err = l.heldBy(ctx, pciAddress, wholeGPU, err)
	}
	return &RefusedError{wrap(err)}
}

// CreateInstance makes a GPU instance at an address where none is, and returns its ID. Whatever the driver answers is
// compared with what is there afterwards: drivers have returned an error for a call that took effect. An instance
// without compute instance that an unsuccessful call has left is removed; what has one was made by somebody else.
func (l *Lifecycle) CreateInstance(ctx context.Context, a Address) (instanceID int, err error) {
	id, err := l.hw.CreateInstance(ctx, a.PCIAddress, a.ProfileID, a.Placement)
	if err == nil {
		klog.FromContext(ctx).V(4).Info("GPU instance created", "at", a.String(), "instanceID", id)
		return id, nil
	}
	err = fmt.Errorf("create a partition with %s: %w", a, err)
	if gpu.IsPending(err) {
		return 0, err
	}
	check, cancel := afterwards(ctx)
	defer cancel()
	state, checkErr := l.hw.MIGState(check, a.PCIAddress)
	if checkErr != nil {
		return 0, errors.Join(err, checkErr)
	}
	// For want of room nothing was made: what is there was made by somebody else.
	if left := Instance(state, a); left != nil && len(left.Compute) == 0 && !errors.Is(err, gpu.ErrNoRoom) {
		if undoErr := l.DestroyInstance(check, a.PCIAddress, left.ID); undoErr != nil {
			return 0, errors.Join(err, fmt.Errorf("undo: %w", undoErr))
		}
	}
	return 0, &RefusedError{l.explainRefusal(check, a, err)}
}

// CreateCompute gives a GPU instance a compute instance that spans it.
func (l *Lifecycle) CreateCompute(ctx context.Context, pciAddress string, instanceID int) (gpu.PartitionID, error) {
	compute, err := l.hw.CreateComputeInstance(ctx, pciAddress, instanceID)
	if err != nil {
		return gpu.PartitionID{}, fmt.Errorf("create a compute instance in GPU instance %d of GPU %s: %w", instanceID, pciAddress, err)
	}
	klog.FromContext(ctx).V(2).Info("Compute instance created", "pciAddress", pciAddress, "instanceID", instanceID, "uuid", compute.UUID)
	return gpu.PartitionID{InstanceID: instanceID, ComputeID: compute.ID, UUID: compute.UUID}, nil
}

// DestroyCompute destroys a compute instance. None is a success. Where it is in use the error wraps gpu.ErrInUse and
// names who has it. One that is still there after a success keeps its GPU instance from being destroyed.
func (l *Lifecycle) DestroyCompute(ctx context.Context, pciAddress string, instanceID, computeID int) error {
	err := l.hw.DestroyComputeInstance(ctx, pciAddress, instanceID, computeID)
	if err == nil {
		return nil
	}
	return l.confirmGone(ctx, pciAddress, fmt.Sprintf("compute instance %d of GPU instance %d", computeID, instanceID), instanceID, err,
		func(i gpu.Instance) bool {
			return i.ID == instanceID && slices.ContainsFunc(i.Compute, func(c gpu.ComputeInstance) bool { return c.ID == computeID })
		})
}

// DestroyInstance destroys a GPU instance without compute instances. None is a success.
func (l *Lifecycle) DestroyInstance(ctx context.Context, pciAddress string, instanceID int) error {
	err := l.hw.DestroyInstance(ctx, pciAddress, instanceID)
	if err == nil {
		klog.FromContext(ctx).V(2).Info("GPU instance destroyed", "pciAddress", pciAddress, "instanceID", instanceID)
		return nil
	}
	return l.confirmGone(ctx, pciAddress, fmt.Sprintf("GPU instance %d", instanceID), instanceID, err,
		func(i gpu.Instance) bool { return i.ID == instanceID })
}

// confirmGone compares the error of a destroying call with what is there: it may have taken effect, or somebody else's.
func (l *Lifecycle) confirmGone(ctx context.Context, pciAddress, what string, instanceID int, cause error, is func(gpu.Instance) bool) error {
	wrap := func(err error) error { return fmt.Errorf("destroy %s of GPU %s: %w", what, pciAddress, err) }
	if gpu.IsPending(cause) {
		return wrap(cause)
	}
	check, cancel := afterwards(ctx)
	defer cancel()
	state, err := l.hw.MIGState(check, pciAddress)
	switch {
	case err != nil:
		return wrap(errors.Join(cause, err))
	case !slices.ContainsFunc(state.Instances, is):
		klog.FromContext(ctx).V(2).Info("Gone", "pciAddress", pciAddress, "what", what, "reason", cause)
		return nil
	case errors.Is(cause, gpu.ErrInUse):
		return wrap(l.heldBy(ctx, pciAddress, instanceID, cause))
	}
	return wrap(cause)
}

// Holders says who holds a GPU, for people.
func (l *Lifecycle) Holders(ctx context.Context, pciAddress string) string {
	return l.holdersOf(ctx, pciAddress, wholeGPU)
}

// holdersOf says who holds a GPU instance. It asks even after the caller's deadline, since this is what an administrator needs
// to know.
func (l *Lifecycle) holdersOf(ctx context.Context, pciAddress string, instanceID int) string {
	ctx, cancel := afterwards(ctx)
	defer cancel()
	processes, err := l.hw.Processes(ctx, pciAddress)
	text := l.holders.Describe(ctx, pciAddress, instanceID, processes)
	if err != nil {
		text += fmt.Sprintf(" (which processes the driver lists is not known: %v)", err)
	}
	return text
}

func (l *Lifecycle) heldBy(ctx context.Context, pciAddress string, instanceID int, err error) error {
	return fmt.Errorf("%w, held by %s", err, l.holdersOf(ctx, pciAddress, instanceID))
}
