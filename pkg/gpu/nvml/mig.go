// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// MIGState returns the GPU's instances, ordered by placement. It includes instances
// without compute instance, which a walk over MIG devices does not find.
//
// The error wraps gpu.ErrNotSupported on a GPU without MIG, and gpu.ErrLost or
// gpu.ErrResetRequired on any GPU that needs an administrator. It is cheap enough to
// be called every few seconds: 2 calls of the library while MIG mode is off, 9 on an
// empty H100, 36 on one with seven partitions.
func (c *Client) MIGState(ctx context.Context, pciAddress string) (gpu.MIGState, error) {
	var state gpu.MIGState
	err := c.onGPU(ctx, pciAddress, func(h *handle) error {
		if err := h.present(ctx); err != nil {
			return err
		}
		mode, err := h.migMode(ctx)
		if err != nil {
			return err
		}
		state = gpu.MIGState{Enabled: mode.current, Pending: mode.pending}
		if !mode.current {
			return nil // there can be no instances, and listing them is refused
		}
		state.Instances, err = h.instances(ctx)
		return supported(err)
	})
	if err != nil {
		return gpu.MIGState{}, err
	}
	c.ids.note(pciAddress, state.Instances, time.Now())
	return state, nil
}

// present fails if the GPU has fallen off the bus or waits for a reset. The functions
// for MIG do not promise to report that; the one called here asks the GPU.
func (h *handle) present(ctx context.Context) error {
	_, err := get(ctx, h.queue, "nvmlDeviceGetMemoryInfo", h.dev.GetMemoryInfo)
	if errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrResetRequired) {
		return err
	}
	return nil // any other error will be that of the next call too
}

// instances lists the instances of one profile after the other, since the library has
// no list of all, until all compute slices are accounted for.
func (h *handle) instances(ctx context.Context) ([]gpu.Instance, error) {
	profiles, err := h.instanceProfiles(ctx)
	if err != nil {
		return nil, err
	}
	if len(profiles) == 0 {
		return nil, &gpu.Error{
			Call: "nvmlDeviceGetGpuInstanceProfileInfo", PCIAddress: h.pci, Text: "MIG mode is on, but no profile is supported",
		}
	}
	free := 0
	for _, p := range profiles {
		free = max(free, int(p.info.SliceCount))
	}
	var out []gpu.Instance
	for _, p := range profiles {
		if free <= 0 {
			break
		}
		// "Not supported" is no answer for a profile that is: an instance that
		// is overlooked here is lost.
		found, err := get(ctx, h.queue, "nvmlDeviceGetGpuInstances", func() ([]nvml.GpuInstance, nvml.Return) {
			return h.dev.GetGpuInstances(&p.info)
		})
		if err != nil {
			return nil, err
		}
		for _, gi := range found {
			instance, err := h.instance(ctx, gi, int(p.info.SliceCount))
			if errors.Is(err, gpu.ErrNotFound) {
				continue // destroyed by someone else since it was listed
			}
			if err != nil {
				return nil, err
			}
			out = append(out, instance)
			free -= int(p.info.SliceCount)
		}
	}
	slices.SortFunc(out, func(a, b gpu.Instance) int {
		return cmp.Or(cmp.Compare(a.Placement.Start, b.Placement.Start), cmp.Compare(a.ID, b.ID))
	})
	return out, nil
}

// supported removes gpu.ErrNotSupported from an error that cannot mean it: MIGState
// returns it for GPUs without MIG only.
func supported(err error) error {
	var failed *gpu.Error
	if errors.Is(err, gpu.ErrNotSupported) && errors.As(err, &failed) {
		return &gpu.Error{Call: failed.Call, PCIAddress: failed.PCIAddress, Text: failed.Text}
	}
	return err
}

// instance reads a GPU instance.
func (h *handle) instance(ctx context.Context, gi nvml.GpuInstance, free int) (gpu.Instance, error) {
	info, err := get(ctx, h.queue, "nvmlGpuInstanceGetInfo", gi.GetInfo)
	if err != nil {
		return gpu.Instance{}, err
	}
	instance := gpu.Instance{
		ID:        int(info.Id),
		ProfileID: info.ProfileId,
		Placement: gpu.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)},
	}
	profiles, err := h.computeProfiles(ctx, gi, info.ProfileId)
	if err != nil {
		return gpu.Instance{}, err
	}
	for _, p := range profiles {
		if free <= 0 {
			break
		}
		found, err := get(ctx, h.queue, "nvmlGpuInstanceGetComputeInstances", func() ([]nvml.ComputeInstance, nvml.Return) {
			return gi.GetComputeInstances(&p)
		})
		if err != nil {
			return gpu.Instance{}, err
		}
		for _, ci := range found {
			compute, err := h.computeInstance(ctx, ci)
			if errors.Is(err, gpu.ErrNotFound) {
				continue
			}
			if err != nil {
				return gpu.Instance{}, err
			}
			instance.Compute = append(instance.Compute, compute)
			free -= int(p.SliceCount)
		}
	}
	slices.SortFunc(instance.Compute, func(a, b gpu.ComputeInstance) int { return cmp.Compare(a.ID, b.ID) })
	return instance, nil
}

// computeInstance reads a compute instance. Its UUID comes from the MIG device handle
// in its description: a walk over all MIG devices takes up to ten seconds under
// load.
func (h *handle) computeInstance(ctx context.Context, ci nvml.ComputeInstance) (gpu.ComputeInstance, error) {
	info, err := get(ctx, h.queue, "nvmlComputeInstanceGetInfo_v2", ci.GetInfo)
	if err != nil {
		return gpu.ComputeInstance{}, err
	}
	uuid, err := get(ctx, h.queue, "nvmlDeviceGetUUID", info.Device.GetUUID)
	if err != nil {
		return gpu.ComputeInstance{}, err
	}
	if !strings.HasPrefix(uuid, "MIG-") {
		return gpu.ComputeInstance{}, fmt.Errorf("UUID of compute instance %d on GPU %s is %q: not a MIG device's", info.Id, h.pci, uuid)
	}
	return gpu.ComputeInstance{ID: int(info.Id), UUID: uuid, Slices: int(info.Placement.Size)}, nil
}

// SetMIGMode sets MIG mode, unless it is set already, and reads it back: the driver
// has been seen to return success and to do nothing.
//
// The error wraps gpu.ErrInUse while a process holds the GPU, and
// gpu.ErrResetRequired if the change needs a GPU reset; then it stays pending. Minor
// numbers may change. It takes about 4 s if the GPU must be initialised again.
func (c *Client) SetMIGMode(ctx context.Context, pciAddress string, enabled bool) error {
	const call = "nvmlDeviceSetMigMode"
	target := nvml.DEVICE_MIG_DISABLE
	if enabled {
		target = nvml.DEVICE_MIG_ENABLE
	}

	var activation nvml.Return
	unchanged := false
	err := c.onGPU(ctx, pciAddress, func(h *handle) error {
		mode, err := h.migMode(ctx)
		if err != nil {
			return err
		}
		if unchanged = mode.current == enabled && mode.pending == enabled; unchanged {
			return nil
		}
		activation, err = get(ctx, h.queue, call, func() (activation, ret nvml.Return) { return h.dev.SetMigMode(target) })
		c.forget(h) // the change may reset the GPU
		return err
	})
	if err != nil || unchanged {
		return err
	}

	var mode migMode
	err = c.onGPU(ctx, pciAddress, func(h *handle) (err error) {
		mode, err = h.migMode(ctx)
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("MIG mode was set, reading it back failed: %w", err)
	case mode.current == enabled:
		return nil
	case activation != nvml.SUCCESS:
		return failure(call+" (activation)", pciAddress, activation)
	case mode.pending == enabled:
		return &gpu.Error{
			Call: call, PCIAddress: pciAddress, Err: gpu.ErrResetRequired,
			Text: "the change is pending until the GPU is reset",
		}
	default:
		return &gpu.Error{
			Call: call, PCIAddress: pciAddress,
			Text: "answered success, but the mode is still " + onOff(mode.current),
		}
	}
}

func onOff(enabled bool) string {
	if enabled {
		return "on"
	}
	return "off"
}
