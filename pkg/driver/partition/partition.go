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

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/wait"
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

// Lifecycle creates and destroys partitions. It keeps no state and takes no lock: the
// caller locks the GPU around every call. Calls for different GPUs may be concurrent.
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

// wholeGPU means all instances in place of an instance id.
const wholeGPU = -1

var (
	// ErrForeign means that the instance at an address is not the caller's.
	ErrForeign = errors.New("it was not made by this driver and is left alone")
	// ErrDivided means that a GPU cannot be used undivided because there are instances on
	// it. It wraps gpu.ErrInUse, but waiting does not help.
	ErrDivided = fmt.Errorf("it is partitioned: %w", gpu.ErrInUse)
)

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
func Lookup(state gpu.MIGState, a Address) (gpu.PartitionID, bool) {
	instance := Instance(state, a)
	if instance == nil || len(instance.Compute) != 1 {
		return gpu.PartitionID{}, false
	}
	compute := instance.Compute[0]
	return gpu.PartitionID{InstanceID: instance.ID, ComputeID: compute.ID, UUID: compute.UUID}, true
}

// Instance returns the GPU instance at an address, complete or not, or nil.
func Instance(state gpu.MIGState, a Address) *gpu.Instance {
	i := slices.IndexFunc(state.Instances, func(i gpu.Instance) bool {
		return i.ProfileID == a.ProfileID && i.Placement == a.Placement
	})
	if i < 0 {
		return nil
	}
	return &state.Instances[i]
}

// explainRefusal adds to gpu.ErrNoRoom which instances are in the way, and to gpu.ErrInUse, with which a GPU's first instance
// is refused while programs have memory or channels on it, who has it in use.
func (l *Lifecycle) explainRefusal(ctx context.Context, a Address, err error) error {
	if errors.Is(err, gpu.ErrInUse) {
		return l.heldBy(ctx, a.PCIAddress, wholeGPU, err)
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
