// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"context"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Hardware is what the life cycle needs of the GPUs. GPUs are named by their
// PCI address; errors wrap the reasons of package gpu.
type Hardware interface {
	Observer
	ModeSwitch
	Instances
	ComputeInstances
}

// Observer reads.
type Observer interface {
	// MIGState lists all instances, those without compute instance included.
	// The error wraps gpu.ErrNotSupported on a GPU without MIG.
	MIGState(ctx context.Context, pciAddress string) (gpu.MIGState, error)
	Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error)
}

// ModeSwitch turns MIG mode on and off, and returns nil only when the mode has
// changed.
type ModeSwitch interface {
	SetMIGMode(ctx context.Context, pciAddress string, enabled bool) error
}

// Instances are GPU instances.
type Instances interface {
	CreateInstance(ctx context.Context, pciAddress string, profileID uint32, at gpu.Placement) (instanceID int, err error)
	DestroyInstance(ctx context.Context, pciAddress string, instanceID int) error
}

// ComputeInstances live in GPU instances. The one that is created spans the
// whole GPU instance.
type ComputeInstances interface {
	CreateComputeInstance(ctx context.Context, pciAddress string, instanceID int) (gpu.ComputeInstance, error)
	DestroyComputeInstance(ctx context.Context, pciAddress string, instanceID, computeID int) error
}
