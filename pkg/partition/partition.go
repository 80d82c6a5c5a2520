// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package partition creates and destroys MIG partitions. A partition is a GPU
// instance with one compute instance that spans it.
//
// Partitions are identified by their physical address, not by the driver's ids: an
// address can be recorded before anything exists, and finds a half-created partition
// after a crash.
package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/wait"
)

// Address is where a partition is or will be. It survives a reboot.
type Address struct {
	PCIAddress string `json:"pciAddress"`
	// ProfileID is the driver's profile id ("nvidia-smi mig -lgip").
	ProfileID uint32        `json:"profileID"`
	Placement gpu.Placement `json:"placement"`
}

// String returns "profile 19 at 4:1 on GPU 0000:1b:00.0".
func (a Address) String() string {
	return fmt.Sprintf("profile %d at %s on GPU %s", a.ProfileID, placement(a.Placement), a.PCIAddress)
}

// Live identifies the partition at an address. Every creation gives new values.
type Live struct {
	InstanceID int    `json:"instanceID"`
	ComputeID  int    `json:"computeID"`
	UUID       string `json:"uuid"`
}

// Lifecycle creates and destroys partitions. It keeps no state and takes no lock: the
// caller locks the GPU around every call. Calls for different GPUs may be concurrent.
//
// The dynamic parameter of its methods allows them to change the GPU's MIG mode
// (gpu.MIG.Dynamic).
type Lifecycle struct {
	hw      Hardware
	holders Holders
	// wait is wait.For, except in tests.
	wait func(ctx context.Context, d time.Duration) error
}

// New returns a Lifecycle.
func New(hw Hardware, holders Holders) *Lifecycle {
	return &Lifecycle{hw: hw, holders: holders, wait: wait.For}
}

// cleanupTime bounds the undo after a failure. The undo does not share the caller's
// deadline, which may be why the call failed.
const cleanupTime = 15 * time.Second

// State returns all instances of a GPU, including foreign ones. The error wraps
// gpu.ErrNotSupported on a GPU without MIG.
func (l *Lifecycle) State(ctx context.Context, pciAddress string) (gpu.MIGState, error) {
	state, err := l.hw.MIGState(ctx, pciAddress)
	if err != nil {
		return gpu.MIGState{}, fmt.Errorf("read the partitions of GPU %s: %w", pciAddress, err)
	}
	return state, nil
}

// Processes returns the processes on a GPU and on its instances.
func (l *Lifecycle) Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	processes, err := l.hw.Processes(ctx, pciAddress)
	if err != nil {
		return nil, fmt.Errorf("list the processes on GPU %s: %w", pciAddress, err)
	}
	return processes, nil
}

// Lookup returns the partition at an address, given the state of its GPU. A GPU
// instance without compute instance, or with several, is not a partition.
func Lookup(state gpu.MIGState, a Address) (Live, bool) {
	instance := find(state, a)
	if instance == nil || len(instance.Compute) != 1 {
		return Live{}, false
	}
	return newLive(*instance, instance.Compute[0]), true
}

// Ensure creates the partition, or completes and returns the one that is at
// the address already, if the caller expects it. Whether there is one and
// whether it is expected are decided on the same reading of the hardware that
// the creation starts from. Ensure enables MIG mode where that is needed and
// dynamic allows it.
//
// A partition is created completely or not at all: when a step fails, the GPU
// instance at the address is removed, and MIG mode is disabled if no instance
// is left.
//
// The error wraps ErrForeign when an instance at the address is not the
// expected one, and gpu.ErrNoRoom when another instance overlaps the address.
func (l *Lifecycle) Ensure(ctx context.Context, a Address, expect Expect, dynamic bool) (Live, error) {
	live, err := l.ensure(ctx, a, expect, dynamic)
	if err != nil {
		return Live{}, fmt.Errorf("create a partition with %s: %w", a, err)
	}
	return live, nil
}

func (l *Lifecycle) ensure(ctx context.Context, a Address, expect Expect, dynamic bool) (Live, error) {
	state, err := l.ensureEnabled(ctx, a.PCIAddress, dynamic)
	if err != nil {
		return Live{}, err
	}
	// Both checks come before anything that would have to be undone: the undo
	// must not remove an instance that is not ours.
	instance := find(state, a)
	if instance == nil {
		if err := checkOverlap(state, a); err != nil {
			return Live{}, err
		}
	} else {
		if err := expect.Check(*instance); err != nil {
			return Live{}, err
		}
		if len(instance.Compute) == 1 {
			return newLive(*instance, instance.Compute[0]), nil
		}
	}
	made, ours, err := l.build(ctx, a, instance)
	if err != nil {
		return Live{}, errors.Join(err, l.undo(ctx, a, ours, dynamic))
	}
	return made, nil
}

// build creates what is missing at the address: the compute instance, and the
// GPU instance if there is none. If it fails, ours accepts the GPU instance
// that this call may have left.
func (l *Lifecycle) build(ctx context.Context, a Address, instance *gpu.Instance) (made Live, ours check, err error) {
	logger := klog.FromContext(ctx).WithValues("pciAddress", a.PCIAddress, "profileID", a.ProfileID, "placement", placement(a.Placement))
	if instance == nil {
		id, err := l.hw.CreateInstance(ctx, a.PCIAddress, a.ProfileID, a.Placement)
		if err != nil {
			return Live{}, withoutCompute, l.explainRefusal(ctx, a, err)
		}
		logger.V(2).Info("GPU instance created", "instanceID", id)
		instance = &gpu.Instance{ID: id}
	} else {
		logger.Info("Completing a GPU instance that has no compute instance", "instanceID", instance.ID)
	}
	compute, err := l.hw.CreateComputeInstance(ctx, a.PCIAddress, instance.ID)
	if err != nil {
		return Live{}, withID(instance.ID), fmt.Errorf("compute instance in GPU instance %d: %w", instance.ID, err)
	}
	logger.V(2).Info("Compute instance created", "instanceID", instance.ID, "computeID", compute.ID, "uuid", compute.UUID)
	return newLive(*instance, compute), nil, nil
}

// undo removes what a failed creation left, whatever the failed call reported:
// drivers have returned an error for a call that took effect.
func (l *Lifecycle) undo(ctx context.Context, a Address, ours check, dynamic bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if err := l.destroy(ctx, a, ours, dynamic); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// explainRefusal adds to gpu.ErrNoRoom which instances are in the way, and to gpu.ErrInUse, with which a GPU's first instance
// is refused while programs have memory or channels on it, who has it in use.
func (l *Lifecycle) explainRefusal(ctx context.Context, a Address, err error) error {
	if errors.Is(err, gpu.ErrInUse) {
		return l.withHolders(ctx, a.PCIAddress, wholeGPU, err)
	}
	if !errors.Is(err, gpu.ErrNoRoom) {
		return err
	}
	state, stateErr := l.hw.MIGState(ctx, a.PCIAddress)
	if stateErr != nil {
		return err
	}
	if blocked := checkOverlap(state, a); blocked != nil {
		return errors.Join(err, blocked)
	}
	if len(state.Instances) > 0 {
		return fmt.Errorf("%w; no instance overlaps, so one of these uses an engine that the profile needs: %s",
			err, names(state.Instances))
	}
	return err
}

// find returns the instance with this profile and placement, or nil.
func find(state gpu.MIGState, a Address) *gpu.Instance {
	i := slices.IndexFunc(state.Instances, func(i gpu.Instance) bool {
		return i.ProfileID == a.ProfileID && i.Placement == a.Placement
	})
	if i < 0 {
		return nil
	}
	return &state.Instances[i]
}

// checkOverlap fails if an instance that is not at the address overlaps it.
func checkOverlap(state gpu.MIGState, a Address) error {
	var others []gpu.Instance
	for _, i := range state.Instances {
		if i.Placement.Overlaps(a.Placement) && (i.ProfileID != a.ProfileID || i.Placement != a.Placement) {
			others = append(others, i)
		}
	}
	if len(others) == 0 {
		return nil
	}
	return fmt.Errorf("the placement is taken by %s: %w", names(others), gpu.ErrNoRoom)
}

func newLive(instance gpu.Instance, compute gpu.ComputeInstance) Live {
	return Live{InstanceID: instance.ID, ComputeID: compute.ID, UUID: compute.UUID}
}

// placement formats a placement as nvidia-smi does: start:size.
func placement(p gpu.Placement) string {
	return strconv.Itoa(p.Start) + ":" + strconv.Itoa(p.Size)
}

func names(instances []gpu.Instance) string {
	out := make([]string, 0, len(instances))
	for _, i := range instances {
		out = append(out, fmt.Sprintf("GPU instance %d (profile %d, placement %s)", i.ID, i.ProfileID, placement(i.Placement)))
	}
	return strings.Join(out, ", ")
}
