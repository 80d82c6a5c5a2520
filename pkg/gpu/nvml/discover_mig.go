// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// migMode is the result of nvmlDeviceGetMigMode.
type migMode struct{ current, pending bool }

func (r *reading) migMode() migMode {
	return must(r, "nvmlDeviceGetMigMode", r.getMIGMode)
}

func (h *handle) getMIGMode() (migMode, nvml.Return) {
	current, pending, ret := h.dev.GetMigMode()
	return migMode{current: current == nvml.DEVICE_MIG_ENABLE, pending: pending == nvml.DEVICE_MIG_ENABLE}, ret
}

// readMIG reads how the GPU can be partitioned. If that fails the GPU is broken: it
// would otherwise be published as undivided.
func readMIG(r *reading, g *gpu.GPU) {
	mode, capable := ask(r, "nvmlDeviceGetMigMode", r.getMIGMode)
	if !capable {
		return
	}
	mig := &gpu.MIG{Enabled: mode.current, Dynamic: modeIsDynamic(r)}
	for _, p := range readProfiles(r) {
		places := readPlacements(r, p)
		if len(places) == 0 {
			continue // known to the driver, not possible on this board
		}
		mig.Profiles = append(mig.Profiles, gpu.Profile{
			ID:           p.info.Id,
			Name:         readProfileName(r, p),
			Slices:       int(p.info.SliceCount),
			MaxInstances: int(p.info.InstanceCount),
			Resources:    profileResources(p.info),
			Placements:   places,
		})
	}
	if r.err != nil || len(mig.Profiles) == 0 {
		return
	}
	mig.MemorySlices = memorySlices(mig.Profiles)
	g.Resources = wholeResources(g.Resources.MemoryBytes, mig.Profiles)
	g.MIG = mig
}

// modeIsDynamic reports whether MIG mode can be changed without a GPU reset: from
// Hopper on, and not in a vGPU guest, where the hypervisor decides.
func modeIsDynamic(r *reading) bool {
	arch, _ := ask(r, "nvmlDeviceGetArchitecture", r.dev.GetArchitecture)
	virtualization, _ := ask(r, "nvmlDeviceGetVirtualizationMode", r.dev.GetVirtualizationMode)
	return arch >= nvml.DEVICE_ARCH_HOPPER && arch != nvml.DEVICE_ARCH_UNKNOWN &&
		virtualization != nvml.GPU_VIRTUALIZATION_MODE_VGPU
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
