// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// maxEnum bounds enumerations that end when the library returns INVALID_ARGUMENT.
// NVML 13 ends at 18 and 9.
const maxEnum = 128

const mib = 1 << 20

// instanceProfile is a GPU instance profile.
type instanceProfile struct {
	enumerated[nvml.GpuInstanceProfileInfo]
	// compute are the compute instance profiles of its instances, nil until they were read.
	compute atomic.Pointer[[]nvml.ComputeInstanceProfileInfo]
}

// enumerated is a profile together with the constant under which NVML enumerates it.
type enumerated[T any] struct {
	enum int
	info T
}

// enumerate returns what the library has for 0, 1, 2, … until it returns INVALID_ARGUMENT, each driver id once, without
// what is not supported. nvml.h recommends this for forward compatibility: new profiles need no change here.
func enumerate[T any](r *reading, call string, f func(enum int) (T, nvml.Return), id func(T) uint32) (all []enumerated[T]) {
	for enum := range maxEnum {
		info, known := ask(r, call, func() (T, nvml.Return) { return f(enum) })
		switch {
		case known:
			if !slices.ContainsFunc(all, func(e enumerated[T]) bool { return id(e.info) == id(info) }) {
				all = append(all, enumerated[T]{enum, info})
			}
		case errors.Is(r.err, gpu.ErrInvalid) && enum > 0:
			r.err = nil
			return all
		case r.err != nil:
			return nil
		}
	}
	return all
}

// agreed enumerates until two enumerations in a row agree, a few times at most. A profile that is said not to be supported for a
// moment would hide its instances for as long as the list is kept.
func agreed[T any](r *reading, call string, f func(enum int) (T, nvml.Return), id func(T) uint32) []enumerated[T] {
	same := func(a, b enumerated[T]) bool { return a.enum == b.enum && id(a.info) == id(b.info) }
	last := enumerate(r, call, f, id)
	for range 2 {
		all := enumerate(r, call, f, id)
		if r.err != nil || slices.EqualFunc(all, last, same) {
			return all
		}
		last = all
	}
	r.fail(call, nil, "lists other profiles each time")
	return nil
}

// readProfiles returns the GPU instance profiles in the order of their ids. It works with MIG mode
// off, too. Without any the next call may find some.
func readProfiles(r *reading) []*instanceProfile {
	return cached(&r.instanceProfiles, func() (found []*instanceProfile, known bool) {
		id := func(info nvml.GpuInstanceProfileInfo) uint32 { return info.Id }
		for _, e := range agreed(r, "nvmlDeviceGetGpuInstanceProfileInfo", r.dev.GetGpuInstanceProfileInfo, id) {
			found = append(found, &instanceProfile{enumerated: e})
		}
		slices.SortFunc(found, func(a, b *instanceProfile) int { return cmp.Compare(a.info.Id, b.info.Id) })
		return found, r.err == nil && len(found) > 0
	})
}

// readComputeProfiles returns the compute instance profiles of a GPU instance, the largest
// first. They depend on the GPU instance's profile only.
func readComputeProfiles(r *reading, gi nvml.GpuInstance, p *instanceProfile) []nvml.ComputeInstanceProfileInfo {
	return cached(&p.compute, func() (found []nvml.ComputeInstanceProfileInfo, known bool) {
		id := func(info nvml.ComputeInstanceProfileInfo) uint32 { return info.Id }
		for _, e := range agreed(r, "nvmlGpuInstanceGetComputeInstanceProfileInfo", func(enum int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
			return gi.GetComputeInstanceProfileInfo(enum, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		}, id) {
			found = append(found, e.info)
		}
		// The slices alone do not say which is larger: a 1g instance with double memory has 26
		// multiprocessors on an H100, of which the plain one-slice profile takes 16 and its revision 1 all.
		// Where both are alike the plain one stays first: the variants of a size, such as that of seven slices
		// which is tuned for several GPUs at once (NVL), have the larger constants.
		slices.SortStableFunc(found, func(a, b nvml.ComputeInstanceProfileInfo) int {
			return cmp.Or(cmp.Compare(b.SliceCount, a.SliceCount), cmp.Compare(b.MultiprocessorCount, a.MultiprocessorCount))
		})
		return found, r.err == nil && len(found) > 0
	})
}

// readPlacements returns where a profile fits on an empty GPU, in order.
func readPlacements(r *reading, p *instanceProfile) []gpu.Placement {
	found, _ := ask(r, "nvmlDeviceGetGpuInstancePossiblePlacements_v2", func() ([]nvml.GpuInstancePlacement, nvml.Return) {
		return r.dev.GetGpuInstancePossiblePlacements(&p.info)
	})
	var out []gpu.Placement
	for _, at := range found {
		out = append(out, gpu.Placement{Start: int(at.Start), Size: int(at.Size)})
	}
	slices.SortFunc(out, func(a, b gpu.Placement) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Size, b.Size))
	})
	return slices.Compact(out)
}

func profileResources(info nvml.GpuInstanceProfileInfo) gpu.Resources {
	return gpu.Resources{
		MemoryBytes:     info.MemorySizeMB * mib,
		Multiprocessors: int(info.MultiprocessorCount),
		CopyEngines:     int(info.CopyEngineCount),
		Decoders:        int(info.DecoderCount),
		Encoders:        int(info.EncoderCount),
		JPEGEngines:     int(info.JpegCount),
		OFAEngines:      int(info.OfaCount),
	}
}

// readProfileName returns the driver's name of a profile. All drivers from R515 on have names, in the second version of
// the structure. A profile for which one has none gets a name that says nothing but what is known.
func readProfileName(r *reading, p *instanceProfile) string {
	name, known := ask(r, "nvmlDeviceGetGpuInstanceProfileInfoV", func() (string, nvml.Return) {
		info, ret := r.dev.GetGpuInstanceProfileInfoV(p.enum).V2()
		return cString(info.Name[:]), ret
	})
	if !known || name == "" {
		return withoutName(int(p.info.SliceCount), p.info.Id)
	}
	return strings.TrimPrefix(name, "MIG ")
}

func withoutName(slices int, id uint32) string { return fmt.Sprintf("%dg.id%d", slices, id) }

// migMode is the result of nvmlDeviceGetMigMode.
type migMode struct{ current, pending bool }

func (r *reading) migMode() migMode { return must(r, "nvmlDeviceGetMigMode", r.getMIGMode) }

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
		// The driver does not report the number itself.
		for _, at := range places {
			mig.MemorySlices = max(mig.MemorySlices, at.Start+at.Size)
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
