// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

const (
	getComputeMode = "nvmlDeviceGetComputeMode"
	setComputeMode = "nvmlDeviceSetComputeMode"
)

// computeModes are the modes that drivers still have; exclusive-thread is gone.
var computeModes = map[gpu.ComputeMode]nvml.ComputeMode{
	gpu.ComputeDefault:          nvml.COMPUTEMODE_DEFAULT,
	gpu.ComputeExclusiveProcess: nvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
	gpu.ComputeProhibited:       nvml.COMPUTEMODE_PROHIBITED,
}

// ComputeMode returns the compute mode of the GPU, or of one of its MIG devices
// ("MIG-…"). An empty uuid means the GPU.
//
// The error wraps gpu.ErrNotFound if there is no such MIG device, or if the GPU at
// the address has another UUID.
func (c *Client) ComputeMode(ctx context.Context, pciAddress, uuid string) (gpu.ComputeMode, error) {
	var mode gpu.ComputeMode
	err := c.onGPU(ctx, pciAddress, func(h *handle) error {
		dev, err := h.device(ctx, uuid)
		if err != nil {
			return err
		}
		mode, err = h.computeMode(ctx, dev)
		return err
	})
	if err != nil {
		return "", err
	}
	return mode, nil
}

// SetComputeMode sets the compute mode, unless it is set already, and reads it back.
// Processes that use the device are not affected.
//
// Its errors are those of ComputeMode, and gpu.ErrNotSupported for the whole GPU if
// its MIG mode is on: then each MIG device has a mode of its own.
func (c *Client) SetComputeMode(ctx context.Context, pciAddress, uuid string, mode gpu.ComputeMode) error {
	target, ok := computeModes[mode]
	if !ok {
		return &gpu.Error{
			Call: setComputeMode, PCIAddress: pciAddress, Err: gpu.ErrInvalid,
			Text: fmt.Sprintf("no compute mode is called %q", mode),
		}
	}
	return c.onGPU(ctx, pciAddress, func(h *handle) error {
		dev, err := h.device(ctx, uuid)
		if err != nil {
			return err
		}
		was, err := h.computeMode(ctx, dev)
		if err != nil || was == mode {
			return err
		}
		if err := do(ctx, h.queue, setComputeMode, func() nvml.Return { return dev.SetComputeMode(target) }); err != nil {
			return err
		}
		is, err := h.computeMode(ctx, dev)
		if err != nil {
			return fmt.Errorf("compute mode was set to %s, reading it back failed: %w", mode, err)
		}
		if is != mode {
			return &gpu.Error{
				Call: setComputeMode, PCIAddress: pciAddress,
				Text: fmt.Sprintf("answered success, but the mode is %s instead of %s", is, mode),
			}
		}
		return nil
	})
}

func (h *handle) computeMode(ctx context.Context, dev nvml.Device) (gpu.ComputeMode, error) {
	found, err := get(ctx, h.queue, getComputeMode, dev.GetComputeMode)
	if err != nil {
		return "", err
	}
	for mode, number := range computeModes {
		if number == found {
			return mode, nil
		}
	}
	return "", &gpu.Error{
		Call: getComputeMode, PCIAddress: h.pci, Text: fmt.Sprintf("unknown compute mode %d", found),
	}
}

// device returns the GPU itself or a MIG device of it. Reading the UUID costs one
// call and protects a GPU that replaced another one.
func (h *handle) device(ctx context.Context, uuid string) (nvml.Device, error) {
	if strings.HasPrefix(uuid, "MIG-") {
		return h.migDevice(ctx, uuid)
	}
	if uuid == "" {
		return h.dev, nil
	}
	const call = "nvmlDeviceGetUUID"
	is, err := get(ctx, h.queue, call, h.dev.GetUUID)
	if err != nil {
		return nil, err
	}
	if is != uuid {
		return nil, &gpu.Error{
			Call: call, PCIAddress: h.pci, Err: gpu.ErrNotFound, Text: fmt.Sprintf("%s is there, not %s", is, uuid),
		}
	}
	return h.dev, nil
}

// migDevice finds a MIG device through the GPU's instances. The library's look-up by
// UUID walks over the MIG devices of all GPUs, which takes seconds under load and may
// hang on another GPU.
func (h *handle) migDevice(ctx context.Context, uuid string) (nvml.Device, error) {
	absent := &gpu.Error{
		Call: "nvmlDeviceGetGpuInstances", PCIAddress: h.pci, Err: gpu.ErrNotFound, Text: "no MIG device " + uuid,
	}
	mode, err := optional(h.migMode(ctx))
	if err != nil {
		return nil, err
	}
	if !mode.current {
		return nil, absent
	}
	instances, err := h.instances(ctx)
	if err != nil {
		return nil, supported(err)
	}
	for _, instance := range instances {
		for _, compute := range instance.Compute {
			if compute.UUID == uuid {
				return h.deviceOf(ctx, instance.ID, compute.ID)
			}
		}
	}
	return nil, absent
}

// deviceOf returns the MIG device of a compute instance.
func (h *handle) deviceOf(ctx context.Context, instanceID, computeID int) (nvml.Device, error) {
	ci, err := h.findComputeInstance(ctx, instanceID, computeID)
	if err != nil {
		return nil, err
	}
	info, err := get(ctx, h.queue, "nvmlComputeInstanceGetInfo_v2", ci.GetInfo)
	if err != nil {
		return nil, err
	}
	return info.Device, nil
}
