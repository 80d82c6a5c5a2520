// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// migMode is the result of nvmlDeviceGetMigMode.
type migMode struct{ current, pending bool }

func (h *handle) migMode(ctx context.Context) (migMode, error) {
	return get(ctx, h.queue, "nvmlDeviceGetMigMode", func() (migMode, nvml.Return) {
		current, pending, ret := h.dev.GetMigMode()
		return migMode{
			current: current == nvml.DEVICE_MIG_ENABLE,
			pending: pending == nvml.DEVICE_MIG_ENABLE,
		}, ret
	})
}

// readMIG reads how the GPU can be partitioned. If that fails the GPU is broken: it
// would otherwise be published as undivided.
func readMIG(has features) func(context.Context, *handle, *gpu.GPU) error {
	return func(ctx context.Context, h *handle, g *gpu.GPU) error {
		mode, err := h.migMode(ctx)
		if errors.Is(err, gpu.ErrNotSupported) {
			return nil // not MIG-capable
		}
		if err != nil {
			return err
		}
		dynamic, err := h.modeIsDynamic(ctx)
		if err != nil {
			return err
		}
		mig := &gpu.MIG{Enabled: mode.current, Dynamic: dynamic}
		profiles, err := h.instanceProfiles(ctx)
		if err != nil {
			return err
		}
		for _, p := range profiles {
			places, err := optional(h.placements(ctx, p))
			if err != nil {
				return err
			}
			if len(places) == 0 {
				continue // known to the driver, not possible on this board
			}
			name, err := h.driverProfileName(ctx, has, p.enum)
			if err != nil {
				return err
			}
			if name == "" {
				name = computedProfileName(p, g.Resources.MemoryBytes)
			}
			mig.Profiles = append(mig.Profiles, gpu.Profile{
				ID:           p.info.Id,
				Name:         name,
				Slices:       int(p.info.SliceCount),
				MaxInstances: int(p.info.InstanceCount),
				Resources:    profileResources(p.info),
				Placements:   places,
			})
		}
		if len(mig.Profiles) == 0 {
			return nil
		}
		mig.MemorySlices = memorySlices(mig.Profiles)
		g.Resources = wholeResources(g.Resources.MemoryBytes, mig.Profiles)
		g.MIG = mig
		return nil
	}
}

// modeIsDynamic reports whether MIG mode can be changed without a GPU reset: from
// Hopper on, and not in a vGPU guest, where the hypervisor decides.
func (h *handle) modeIsDynamic(ctx context.Context) (bool, error) {
	arch, err := optional(get(ctx, h.queue, "nvmlDeviceGetArchitecture", h.dev.GetArchitecture))
	if err != nil {
		return false, err
	}
	virtualization, err := optional(get(ctx, h.queue, "nvmlDeviceGetVirtualizationMode", h.dev.GetVirtualizationMode))
	if err != nil {
		return false, err
	}
	return arch >= nvml.DEVICE_ARCH_HOPPER && arch != nvml.DEVICE_ARCH_UNKNOWN &&
		virtualization != nvml.GPU_VIRTUALIZATION_MODE_VGPU, nil
}

// memorySlices returns where the last placement ends. The driver does not report the
// number itself.
func memorySlices(profiles []gpu.Profile) int {
	end := 0
	for _, p := range profiles {
		for _, at := range p.Placements {
			end = max(end, at.Start+at.Size)
		}
	}
	return end
}

// wholeResources returns the resources of the undivided GPU: of each, the most that a
// profile has. NVML has no call for it. On all known boards this is what the largest
// profile has.
func wholeResources(memoryBytes uint64, profiles []gpu.Profile) gpu.Resources {
	whole := gpu.Resources{MemoryBytes: memoryBytes}
	for _, p := range profiles {
		r := p.Resources
		whole.Multiprocessors = max(whole.Multiprocessors, r.Multiprocessors)
		whole.CopyEngines = max(whole.CopyEngines, r.CopyEngines)
		whole.Decoders = max(whole.Decoders, r.Decoders)
		whole.Encoders = max(whole.Encoders, r.Encoders)
		whole.JPEGEngines = max(whole.JPEGEngines, r.JPEGEngines)
		whole.OFAEngines = max(whole.OFAEngines, r.OFAEngines)
	}
	return whole
}
