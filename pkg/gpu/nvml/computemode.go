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
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) gpu.ComputeMode { return r.computeMode(r.device(uuid)) })
}

// SetComputeMode sets the compute mode, unless it is set already, and reads it back.
// Processes that use the device are not affected.
//
// Its errors are those of ComputeMode, and gpu.ErrNotSupported for the whole GPU if
// its MIG mode is on: then each MIG device has a mode of its own.
func (c *Client) SetComputeMode(ctx context.Context, pciAddress, uuid string, mode gpu.ComputeMode) error {
	target, ok := computeModes[mode]
	if !ok {
		return &gpu.Error{Call: setComputeMode, PCIAddress: pciAddress, Text: fmt.Sprintf("no compute mode is called %q", mode), Err: gpu.ErrInvalid}
	}
	return c.on(ctx, pciAddress, func(r *reading) {
		dev := r.device(uuid)
		if was := r.computeMode(dev); was == mode {
			return
		}
		r.change(setComputeMode, func() nvml.Return { return dev.SetComputeMode(target) })
		if r.err != nil {
			return
		}
		is := r.computeMode(dev)
		if r.err != nil {
			r.err = fmt.Errorf("compute mode was set to %s, reading it back failed: %w", mode, r.err)
		} else if is != mode {
			r.fail(setComputeMode, nil, fmt.Sprintf("answered success, but the mode is %s instead of %s", is, mode))
		}
	})
}

func (r *reading) computeMode(dev nvml.Device) gpu.ComputeMode {
	found := must(r, getComputeMode, func() (nvml.ComputeMode, nvml.Return) { return dev.GetComputeMode() })
	for mode, number := range computeModes {
		if r.err == nil && number == found {
			return mode
		}
	}
	r.fail(getComputeMode, nil, fmt.Sprintf("unknown compute mode %d", found))
	return ""
}

// device returns the GPU itself or a MIG device of it.
func (r *reading) device(uuid string) nvml.Device {
	if strings.HasPrefix(uuid, "MIG-") {
		return r.migDevice(uuid)
	}
	if uuid != "" {
		r.is(r.dev, uuid)
	}
	return r.dev
}

// is fails if a device has another UUID. That costs one call and protects what has replaced another one.
func (r *reading) is(dev nvml.Device, uuid string) {
	const call = "nvmlDeviceGetUUID"
	if is := must(r, call, func() (string, nvml.Return) { return dev.GetUUID() }); is != uuid {
		r.fail(call, gpu.ErrNotFound, fmt.Sprintf("%s is there, not %s", is, uuid))
	}
}

// migDevice finds a MIG device through the GPU's instances. The library's look-up by
// UUID walks over the MIG devices of all GPUs, which takes seconds under load and may
// hang on another GPU.
func (r *reading) migDevice(uuid string) nvml.Device {
	if mode, _ := ask(r, "nvmlDeviceGetMigMode", r.getMIGMode); mode.current {
		for _, instance := range r.instances() {
			for _, compute := range instance.Compute {
				if compute.UUID == uuid {
					return r.deviceOf(instance.ID, compute.ID)
				}
			}
		}
	}
	r.fail("nvmlDeviceGetGpuInstances", gpu.ErrNotFound, "no MIG device "+uuid)
	return nil
}

// deviceOf returns the MIG device of a compute instance.
func (r *reading) deviceOf(instanceID, computeID int) nvml.Device {
	ci := r.findComputeInstance(instanceID, computeID)
	info := must(r, "nvmlComputeInstanceGetInfo_v2", func() (nvml.ComputeInstanceInfo, nvml.Return) { return ci.GetInfo() })
	return info.Device
}
