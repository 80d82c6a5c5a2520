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

// instanceProfile is a GPU instance profile together with the constant under
// which NVML enumerates it.
type instanceProfile struct {
	enum int
	info nvml.GpuInstanceProfileInfo
	// compute are the compute instance profiles of its instances, nil until they were read.
	compute atomic.Pointer[[]nvml.ComputeInstanceProfileInfo]
}

// enumerate visits 0, 1, 2, … until the library returns INVALID_ARGUMENT, and skips
// what is not supported. nvml.h recommends this for forward compatibility: new
// profiles need no change here.
func enumerate[T any](r *reading, call string, f func(enum int) (T, nvml.Return), visit func(enum int, value T)) {
	for enum := range maxEnum {
		value, known := ask(r, call, func() (T, nvml.Return) { return f(enum) })
		switch {
		case known:
			visit(enum, value)
		case errors.Is(r.err, gpu.ErrInvalid) && enum > 0:
			r.err = nil
			return
		case r.err != nil:
			return
		}
	}
}

// distinct returns the first of each driver id.
func distinct[T any](all []T, id func(T) uint32) (out []T) {
	seen := map[uint32]bool{}
	for _, one := range all {
		if !seen[id(one)] {
			out = append(out, one)
		}
		seen[id(one)] = true
	}
	return out
}

// agreed enumerates until two enumerations in a row agree, a few times at most. A profile that is said not to be supported for a
// moment would hide its instances for as long as the list is kept.
func agreed[T any](r *reading, call string, f func(enum int) (T, nvml.Return), id func(T) uint32, visit func(enum int, value T)) {
	type one struct {
		enum  int
		value T
	}
	same := func(a, b one) bool { return a.enum == b.enum && id(a.value) == id(b.value) }
	var last []one
	for attempt := range 3 {
		var all []one
		enumerate(r, call, f, func(enum int, value T) { all = append(all, one{enum, value}) })
		if r.err != nil {
			return
		}
		if attempt > 0 && slices.EqualFunc(all, last, same) {
			for _, a := range all {
				visit(a.enum, a.value)
			}
			return
		}
		last = all
	}
	r.fail(call, nil, "lists other profiles each time")
}

// readProfiles returns the GPU instance profiles, each driver id once, in their order. It works
// with MIG mode off, too. Without any the next call may find some.
func readProfiles(r *reading) []*instanceProfile {
	return lasting(&r.instanceProfiles, func() (found []*instanceProfile, known bool) {
		id := func(info nvml.GpuInstanceProfileInfo) uint32 { return info.Id }
		agreed(r, "nvmlDeviceGetGpuInstanceProfileInfo", r.dev.GetGpuInstanceProfileInfo, id, func(enum int, info nvml.GpuInstanceProfileInfo) {
			found = append(found, &instanceProfile{enum: enum, info: info})
		})
		found = distinct(found, func(p *instanceProfile) uint32 { return p.info.Id })
		slices.SortFunc(found, func(a, b *instanceProfile) int { return cmp.Compare(a.info.Id, b.info.Id) })
		return found, r.err == nil && len(found) > 0
	})
}

// readComputeProfiles returns the compute instance profiles of a GPU instance, each driver id once, the largest
// first. They depend on the GPU instance's profile only.
func readComputeProfiles(r *reading, gi nvml.GpuInstance, p *instanceProfile) []nvml.ComputeInstanceProfileInfo {
	return lasting(&p.compute, func() (found []nvml.ComputeInstanceProfileInfo, known bool) {
		// The variants of a size come last: one slice has a revision 1, seven slices have one that is
		// tuned for several GPUs at once (NVL).
		var plain, variants []nvml.ComputeInstanceProfileInfo
		id := func(info nvml.ComputeInstanceProfileInfo) uint32 { return info.Id }
		agreed(r, "nvmlGpuInstanceGetComputeInstanceProfileInfo", func(enum int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
			return gi.GetComputeInstanceProfileInfo(enum, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		}, id, func(enum int, info nvml.ComputeInstanceProfileInfo) {
			if enum == nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1 || enum == nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL {
				variants = append(variants, info)
			} else {
				plain = append(plain, info)
			}
		})
		found = distinct(append(plain, variants...), func(p nvml.ComputeInstanceProfileInfo) uint32 { return p.Id })
		// The slices alone do not say which is larger: a 1g instance with double memory has 26
		// multiprocessors on an H100, of which the plain one-slice profile takes 16 and its revision 1 all.
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
