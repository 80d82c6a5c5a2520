// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
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
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) (facts Facts) {
		facts.Persistence = known(r, "nvmlDeviceGetPersistenceMode", func() (bool, nvml.Return) {
			mode, ret := r.dev.GetPersistenceMode()
			return mode == nvml.FEATURE_ENABLED, ret
		})
		if memory := known(r, "nvmlDeviceGetMemoryInfo_v2", r.dev.GetMemoryInfo_v2); memory != nil {
			facts.ReservedBytes, facts.UsedBytes = &memory.Reserved, &memory.Used
		}
		facts.ECC = known(r, "nvmlDeviceGetEccMode", func() (bool, nvml.Return) {
			mode, _, ret := r.dev.GetEccMode()
			return mode == nvml.FEATURE_ENABLED, ret
		})
		facts.Cores = known(r, "nvmlDeviceGetNumGpuCores", r.dev.GetNumGpuCores)
		return facts
	})
}
