// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

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
}

// enumerate visits 0, 1, 2, … until the library returns INVALID_ARGUMENT, and skips
// what is not supported. nvml.h recommends this for forward compatibility: new
// profiles need no change here.
func enumerate[T any](ctx context.Context, q queue, call string, f func(enum int) (T, nvml.Return), visit func(enum int, value T)) error {
	for enum := range maxEnum {
		value, err := get(ctx, q, call, func() (T, nvml.Return) { return f(enum) })
		switch {
		case err == nil:
			visit(enum, value)
		case errors.Is(err, gpu.ErrNotSupported):
		case errors.Is(err, gpu.ErrInvalid) && enum > 0:
			return nil
		default:
			return err
		}
	}
	return nil
}

// instanceProfiles returns the GPU instance profiles, each driver id once. It works
// with MIG mode off, too.
func (h *handle) instanceProfiles(ctx context.Context) ([]instanceProfile, error) {
	h.mu.Lock()
	known := h.gi
	h.mu.Unlock()
	if known != nil {
		return known, nil
	}
	var found []instanceProfile
	err := enumerate(ctx, h.queue, "nvmlDeviceGetGpuInstanceProfileInfo", h.dev.GetGpuInstanceProfileInfo,
		func(enum int, info nvml.GpuInstanceProfileInfo) {
			known := slices.ContainsFunc(found, func(p instanceProfile) bool { return p.info.Id == info.Id })
			if !known {
				found = append(found, instanceProfile{enum: enum, info: info})
			}
		})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(found, func(a, b instanceProfile) int { return cmp.Compare(a.info.Id, b.info.Id) })
	if len(found) == 0 {
		return nil, nil // the next call may find some, so this is not cached
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gi = found
	return found, nil
}

// slicesOf returns the number of compute slices of a profile, 0 if it is unknown.
func slicesOf(profiles []instanceProfile, id uint32) uint32 {
	for _, p := range profiles {
		if p.info.Id == id {
			return p.info.SliceCount
		}
	}
	return 0
}

// computeProfiles returns the compute instance profiles of a GPU instance, each driver
// id once, the largest first. They depend on the GPU instance's profile only.
func (h *handle) computeProfiles(ctx context.Context, gi nvml.GpuInstance, profileID uint32) ([]nvml.ComputeInstanceProfileInfo, error) {
	h.mu.Lock()
	cached, ok := h.ci[profileID]
	h.mu.Unlock()
	if ok {
		return cached, nil
	}
	// The variants of a size come last, so that the plain profile is found
	// first: one slice has a revision 1, seven slices have one that is tuned
	// for several GPUs at once (NVL).
	var plain, variants []nvml.ComputeInstanceProfileInfo
	err := enumerate(ctx, h.queue, "nvmlGpuInstanceGetComputeInstanceProfileInfo",
		func(enum int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
			return gi.GetComputeInstanceProfileInfo(enum, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		},
		func(enum int, info nvml.ComputeInstanceProfileInfo) {
			switch enum {
			case nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1, nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL:
				variants = append(variants, info)
			default:
				plain = append(plain, info)
			}
		})
	if err != nil {
		return nil, err
	}
	var found []nvml.ComputeInstanceProfileInfo
	for _, info := range append(plain, variants...) {
		known := slices.ContainsFunc(found, func(p nvml.ComputeInstanceProfileInfo) bool { return p.Id == info.Id })
		if !known {
			found = append(found, info)
		}
	}
	slices.SortStableFunc(found, func(a, b nvml.ComputeInstanceProfileInfo) int {
		return cmp.Compare(b.SliceCount, a.SliceCount)
	})
	if len(found) == 0 {
		return nil, nil // as above
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ci[profileID] = found
	return found, nil
}

// placements returns where a profile fits on an empty GPU, in order.
func (h *handle) placements(ctx context.Context, p instanceProfile) ([]gpu.Placement, error) {
	found, err := get(ctx, h.queue, "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
		func() ([]nvml.GpuInstancePlacement, nvml.Return) {
			return h.dev.GetGpuInstancePossiblePlacements(&p.info)
		})
	if err != nil {
		return nil, err
	}
	var out []gpu.Placement
	for _, at := range found {
		out = append(out, gpu.Placement{Start: int(at.Start), Size: int(at.Size)})
	}
	slices.SortFunc(out, func(a, b gpu.Placement) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Size, b.Size))
	})
	return slices.Compact(out), nil
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

// driverProfileName reads a profile's name in the newest layout that the driver
// supports. It returns "" if the driver has no names. Any other failure is an error:
// it must not give a profile another name.
func (h *handle) driverProfileName(ctx context.Context, has features, enum int) (string, error) {
	if !has.profileNames {
		return "", nil
	}
	layouts := []func() (string, nvml.Return){
		func() (string, nvml.Return) {
			info, ret := h.dev.GetGpuInstanceProfileInfoV(enum).V3()
			return cString(info.Name[:]), ret
		},
		func() (string, nvml.Return) {
			info, ret := h.dev.GetGpuInstanceProfileInfoV(enum).V2()
			return cString(info.Name[:]), ret
		},
	}
	for _, layout := range layouts {
		name, err := get(ctx, h.queue, "nvmlDeviceGetGpuInstanceProfileInfoV", layout)
		if err == nil {
			return strings.TrimPrefix(name, "MIG "), nil
		}
		if !errors.Is(err, gpu.ErrNotSupported) && !errors.Is(err, gpu.ErrInvalid) {
			return "", err
		}
	}
	return "", nil
}

// computedProfileName returns the name that tools use if the driver has none: the
// memory in it is the profile's share of the GPU, in eighths, of the GPU's memory in
// whole GiB.
func computedProfileName(p instanceProfile, totalBytes uint64) string {
	const eighths = 8
	const gib = 1 << 30
	memory := 0
	if totalBytes > 0 {
		share := math.Ceil(float64(p.info.MemorySizeMB)*mib/float64(totalBytes)*eighths) / eighths
		memory = int(math.Round(share * float64((totalBytes+gib-1)/gib)))
	}
	return fmt.Sprintf("%dg.%dgb%s", p.info.SliceCount, memory, profileSuffix(p.enum))
}

// profileSuffix returns the part of a profile's name about media engines and
// graphics.
func profileSuffix(enum int) string {
	switch enum {
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:
		return "+me"
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME:
		return "+me.all"
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:
		return "-me"
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX,
		nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:
		return "+gfx"
	}
	return ""
}
