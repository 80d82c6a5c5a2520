// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Facts are what a report says of a GPU beside what Discover reads: nothing is decided by
// them. What the library or the GPU does not support is nil.
type Facts struct {
	// Persistence is true where the driver stays initialised without clients.
	Persistence *bool `json:"persistence,omitempty"`
	// ReservedBytes is the part of the memory that the driver keeps for itself.
	ReservedBytes *uint64 `json:"reservedBytes,omitempty"`
	// UsedBytes is what programs have of the memory.
	UsedBytes *uint64 `json:"usedBytes,omitempty"`
	// ECC is true where the memory's errors are corrected.
	ECC *bool `json:"ecc,omitempty"`
	// Cores is the number of CUDA cores.
	Cores *int `json:"cores,omitempty"`
}

// Facts reads them. It changes nothing.
func (c *Client) Facts(ctx context.Context, pciAddress string) (Facts, error) {
	lib, err := c.library()
	if err != nil {
		return Facts{}, err
	}
	r := newAsker(lib)
	var facts Facts
	err = c.onGPU(ctx, pciAddress, func(h *handle) (err error) {
		facts = Facts{}
		facts.Persistence, err = known(ask(ctx, r, h, "nvmlDeviceGetPersistenceMode", func() (bool, nvml.Return) {
			mode, ret := h.dev.GetPersistenceMode()
			return mode == nvml.FEATURE_ENABLED, ret
		}))
		if err != nil {
			return err
		}
		memory, err := known(ask(ctx, r, h, "nvmlDeviceGetMemoryInfo_v2", h.dev.GetMemoryInfo_v2))
		if err != nil {
			return err
		}
		if memory != nil {
			facts.ReservedBytes, facts.UsedBytes = &memory.Reserved, &memory.Used
		}
		facts.ECC, err = known(ask(ctx, r, h, "nvmlDeviceGetEccMode", func() (bool, nvml.Return) {
			mode, _, ret := h.dev.GetEccMode()
			return mode == nvml.FEATURE_ENABLED, ret
		}))
		if err != nil {
			return err
		}
		facts.Cores, err = known(ask(ctx, r, h, "nvmlDeviceGetNumGpuCores", h.dev.GetNumGpuCores))
		return err
	})
	if err != nil {
		return Facts{}, err
	}
	return facts, nil
}

// known returns the value, or nil where it is not supported.
func known[T any](value T, err error) (*T, error) {
	if errors.Is(err, gpu.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &value, nil
}
