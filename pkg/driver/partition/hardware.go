// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"context"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Hardware is what a Lifecycle needs of the GPUs. Errors wrap the reasons of package
// gpu.
type Hardware interface {
	// MIGState returns all instances, including those without compute instance. The
	// error wraps gpu.ErrNotSupported on a GPU without MIG.
	MIGState(ctx context.Context, pciAddress string) (gpu.MIGState, error)
	Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error)
	// FabricPending returns how far the registration with the NVLink fabric is, or nothing if there
	// is none or it is done.
	FabricPending(ctx context.Context, pciAddress string) (string, error)
	// SetMIGMode returns nil only if the mode is the wanted one.
	SetMIGMode(ctx context.Context, pciAddress string, enabled bool) error
	// DestroyInstance returns nil only if the instance was seen to be gone.
	DestroyInstance(ctx context.Context, pciAddress string, instanceID int) error
	CreateInstance(ctx context.Context, pciAddress string, profileID uint32, at gpu.Placement) (instanceID int, err error)
	// CreateComputeInstance makes one that spans the whole GPU instance.
	CreateComputeInstance(ctx context.Context, pciAddress string, instanceID int) (gpu.ComputeInstance, error)
	DestroyComputeInstance(ctx context.Context, pciAddress string, instanceID, computeID int) error
}

// Holders says who keeps a GPU in use.
type Holders interface {
	// Describe names who has a GPU instance in use, or the GPU if instanceID is
	// negative, given the processes that the driver lists on the GPU.
	Describe(ctx context.Context, pciAddress string, instanceID int, listed []gpu.Process) string
}
