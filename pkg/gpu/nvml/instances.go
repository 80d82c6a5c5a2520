// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// CreateInstance creates a GPU instance at exactly this placement and returns its
// id. The error wraps gpu.ErrNoRoom if the placement or an engine is taken, and
// gpu.ErrNotSupported if MIG mode is off. Changing instances needs root.
//
// If the id of the new instance cannot be read, the instance is destroyed. If that
// fails too, or the GPU does not answer, an instance may exist after an error.
func (c *Client) CreateInstance(ctx context.Context, pciAddress string, profileID uint32, at gpu.Placement) (int, error) {
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) int {
		// The library reads nothing but the id of the profile.
		profile := nvml.GpuInstanceProfileInfo{Id: profileID}
		placement := nvml.GpuInstancePlacement{Start: uint32(at.Start), Size: uint32(at.Size)}
		gi := must(r, "nvmlDeviceCreateGpuInstanceWithPlacement", func() (nvml.GpuInstance, nvml.Return) {
			return r.dev.CreateGpuInstanceWithPlacement(&profile, &placement)
		})
		if r.err != nil {
			return 0
		}
		// From here on an instance exists: either the caller gets its id, or it is
		// destroyed, even if the caller's time is up.
		info := must(r, "nvmlGpuInstanceGetInfo", gi.GetInfo)
		r.undo(ctx, "nvmlGpuInstanceDestroy", gi.Destroy)
		return int(info.Id)
	})
}

// undo undoes a creation after a failure.
func (r *reading) undo(ctx context.Context, name string, f func() nvml.Return) {
	if r.err != nil {
		r.err = errors.Join(r.err, do(context.WithoutCancel(ctx), r.queue, name, f))
	}
}

// DestroyInstance destroys a GPU instance, and verifies that it is gone: one that stays after a success
// would be a leak that nothing has a record of. The error wraps gpu.ErrInUse while a
// process or a compute instance is on it, and gpu.ErrNotFound if there is none. It
// takes about a second.
func (c *Client) DestroyInstance(ctx context.Context, pciAddress string, instanceID int) error {
	const call = "nvmlGpuInstanceDestroy"
	return c.on(ctx, pciAddress, func(r *reading) {
		gi := r.findInstance(instanceID)
		r.change(call, func() nvml.Return { return gi.Destroy() })
		if r.err != nil {
			return
		}
		// "Not supported" is no answer here, unlike for findInstance.
		must(r, instanceByID, func() (nvml.GpuInstance, nvml.Return) { return r.dev.GetGpuInstanceById(instanceID) })
		if !r.gone() {
			r.fail(call, nil, fmt.Sprintf("answered success, but GPU instance %d is still there", instanceID))
		}
	})
}

// CreateComputeInstance creates the compute instance that spans the whole GPU
// instance. Its profile is found by enumeration, never guessed from the size. What
// may exist after an error is as with CreateInstance.
func (c *Client) CreateComputeInstance(ctx context.Context, pciAddress string, instanceID int) (gpu.ComputeInstance, error) {
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) gpu.ComputeInstance {
		gi := r.findInstance(instanceID)
		profile := r.wholeComputeProfile(gi)
		ci := must(r, "nvmlGpuInstanceCreateComputeInstance", func() (nvml.ComputeInstance, nvml.Return) {
			return gi.CreateComputeInstance(&profile)
		})
		if r.err != nil {
			return gpu.ComputeInstance{}
		}
		created := readComputeInstance(r, ci)
		r.undo(ctx, "nvmlComputeInstanceDestroy", ci.Destroy)
		return created
	})
}

// DestroyComputeInstance destroys a compute instance. Its errors are those of
// DestroyInstance.
func (c *Client) DestroyComputeInstance(ctx context.Context, pciAddress string, instanceID, computeID int) error {
	return c.on(ctx, pciAddress, func(r *reading) {
		ci := r.findComputeInstance(instanceID, computeID)
		r.change("nvmlComputeInstanceDestroy", func() nvml.Return { return ci.Destroy() })
	})
}

const instanceByID = "nvmlDeviceGetGpuInstanceById"

// findInstance resolves an id. With MIG mode off the library answers
// NOT_SUPPORTED, which means the same as NOT_FOUND: no such instance.
func (r *reading) findInstance(instanceID int) nvml.GpuInstance {
	gi, known := ask(r, instanceByID, func() (nvml.GpuInstance, nvml.Return) { return r.dev.GetGpuInstanceById(instanceID) })
	if !known {
		r.fail(instanceByID, gpu.ErrNotFound, "no instances, MIG mode is off")
	}
	return gi
}

func (r *reading) findComputeInstance(instanceID, computeID int) nvml.ComputeInstance {
	gi := r.findInstance(instanceID)
	return must(r, "nvmlGpuInstanceGetComputeInstanceById", func() (nvml.ComputeInstance, nvml.Return) {
		return gi.GetComputeInstanceById(computeID)
	})
}

// wholeComputeProfile returns the compute instance profile that spans the GPU
// instance: the largest, if it has as many slices.
func (r *reading) wholeComputeProfile(gi nvml.GpuInstance) nvml.ComputeInstanceProfileInfo {
	info := must(r, "nvmlGpuInstanceGetInfo", func() (nvml.GpuInstanceInfo, nvml.Return) { return gi.GetInfo() })
	for _, p := range readProfiles(r) {
		if p.info.Id != info.ProfileId {
			continue
		}
		if all := readComputeProfiles(r, gi, p); len(all) > 0 && all[0].SliceCount == p.info.SliceCount {
			return all[0]
		}
	}
	r.fail("nvmlGpuInstanceGetComputeInstanceProfileInfo", gpu.ErrNotSupported,
		fmt.Sprintf("no compute instance profile has all slices of GPU instance profile %d", info.ProfileId))
	return nvml.ComputeInstanceProfileInfo{}
}
