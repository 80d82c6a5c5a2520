// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

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
	id := 0
	err := c.onGPU(ctx, pciAddress, func(h *handle) error {
		// The library reads nothing but the id of the profile.
		profile := nvml.GpuInstanceProfileInfo{Id: profileID}
		placement := nvml.GpuInstancePlacement{Start: uint32(at.Start), Size: uint32(at.Size)}
		gi, err := get(ctx, h.queue, "nvmlDeviceCreateGpuInstanceWithPlacement", func() (nvml.GpuInstance, nvml.Return) {
			return h.dev.CreateGpuInstanceWithPlacement(&profile, &placement)
		})
		if err != nil {
			return err
		}
		// From here on an instance exists: either the caller gets its id, or it is
		// destroyed, even if the caller's time is up.
		info, err := get(ctx, h.queue, "nvmlGpuInstanceGetInfo", gi.GetInfo)
		if err != nil {
			return errors.Join(err, do(context.WithoutCancel(ctx), h.queue, "nvmlGpuInstanceDestroy", gi.Destroy))
		}
		id = int(info.Id)
		return nil
	})
	return id, err
}

// DestroyInstance destroys a GPU instance. The error wraps gpu.ErrInUse while a
// process or a compute instance is on it, and gpu.ErrNotFound if there is none. It
// takes about a second.
func (c *Client) DestroyInstance(ctx context.Context, pciAddress string, instanceID int) error {
	return c.onGPU(ctx, pciAddress, func(h *handle) error {
		gi, err := h.findInstance(ctx, instanceID)
		if err != nil {
			return err
		}
		return do(ctx, h.queue, "nvmlGpuInstanceDestroy", gi.Destroy)
	})
}

// CreateComputeInstance creates the compute instance that spans the whole GPU
// instance. Its profile is found by enumeration, never guessed from the size. What
// may exist after an error is as with CreateInstance.
func (c *Client) CreateComputeInstance(ctx context.Context, pciAddress string, instanceID int) (gpu.ComputeInstance, error) {
	var created gpu.ComputeInstance
	err := c.onGPU(ctx, pciAddress, func(h *handle) error {
		gi, err := h.findInstance(ctx, instanceID)
		if err != nil {
			return err
		}
		profile, err := h.wholeComputeProfile(ctx, gi)
		if err != nil {
			return err
		}
		ci, err := get(ctx, h.queue, "nvmlGpuInstanceCreateComputeInstance", func() (nvml.ComputeInstance, nvml.Return) {
			return gi.CreateComputeInstance(&profile)
		})
		if err != nil {
			return err
		}
		if created, err = h.computeInstance(ctx, ci); err != nil {
			return errors.Join(err, do(context.WithoutCancel(ctx), h.queue, "nvmlComputeInstanceDestroy", ci.Destroy))
		}
		return nil
	})
	return created, err
}

// DestroyComputeInstance destroys a compute instance. Its errors are those of
// DestroyInstance.
func (c *Client) DestroyComputeInstance(ctx context.Context, pciAddress string, instanceID, computeID int) error {
	return c.onGPU(ctx, pciAddress, func(h *handle) error {
		ci, err := h.findComputeInstance(ctx, instanceID, computeID)
		if err != nil {
			return err
		}
		return do(ctx, h.queue, "nvmlComputeInstanceDestroy", ci.Destroy)
	})
}

// findInstance resolves an id. With MIG mode off the library answers
// NOT_SUPPORTED, which means the same as NOT_FOUND: no such instance.
func (h *handle) findInstance(ctx context.Context, instanceID int) (nvml.GpuInstance, error) {
	const call = "nvmlDeviceGetGpuInstanceById"
	gi, err := get(ctx, h.queue, call, func() (nvml.GpuInstance, nvml.Return) {
		return h.dev.GetGpuInstanceById(instanceID)
	})
	if errors.Is(err, gpu.ErrNotSupported) {
		return nil, &gpu.Error{Call: call, PCIAddress: h.pci, Text: "no instances, MIG mode is off", Err: gpu.ErrNotFound}
	}
	return gi, err
}

func (h *handle) findComputeInstance(ctx context.Context, instanceID, computeID int) (nvml.ComputeInstance, error) {
	gi, err := h.findInstance(ctx, instanceID)
	if err != nil {
		return nil, err
	}
	return get(ctx, h.queue, "nvmlGpuInstanceGetComputeInstanceById", func() (nvml.ComputeInstance, nvml.Return) {
		return gi.GetComputeInstanceById(computeID)
	})
}

// wholeComputeProfile returns the compute instance profile that spans the GPU
// instance: of those with as many slices, the one with the most multiprocessors.
// The slices alone do not identify it: a 1g instance with double memory has 26
// multiprocessors on an H100, of which the plain one-slice profile takes 16 and its
// revision 1 all.
func (h *handle) wholeComputeProfile(ctx context.Context, gi nvml.GpuInstance) (nvml.ComputeInstanceProfileInfo, error) {
	var none nvml.ComputeInstanceProfileInfo
	info, err := get(ctx, h.queue, "nvmlGpuInstanceGetInfo", gi.GetInfo)
	if err != nil {
		return none, err
	}
	instanceProfiles, err := h.instanceProfiles(ctx)
	if err != nil {
		return none, err
	}
	sliceCount := slicesOf(instanceProfiles, info.ProfileId)
	computeProfiles, err := h.computeProfiles(ctx, gi, info.ProfileId)
	if err != nil {
		return none, err
	}
	whole := slices.DeleteFunc(slices.Clone(computeProfiles), func(p nvml.ComputeInstanceProfileInfo) bool {
		return p.SliceCount != sliceCount
	})
	if len(whole) == 0 {
		return none, &gpu.Error{
			Call: "nvmlGpuInstanceGetComputeInstanceProfileInfo", PCIAddress: h.pci, Err: gpu.ErrNotSupported,
			Text: fmt.Sprintf("no compute instance profile has all %d slices of GPU instance profile %d", sliceCount, info.ProfileId),
		}
	}
	// Among equals this is the first, which is the plain profile.
	return slices.MaxFunc(whole, func(a, b nvml.ComputeInstanceProfileInfo) int {
		return cmp.Compare(a.MultiprocessorCount, b.MultiprocessorCount)
	}), nil
}
