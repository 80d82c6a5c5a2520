// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// noInstance is NVML's id for "the undivided GPU".
const noInstance = 0xFFFFFFFF

// Processes returns the processes that use the GPU or an instance of it, for compute
// (MPS included) or graphics, each once per instance. NVML does not list processes
// that only have a management handle open, such as monitoring agents, nor, to a
// caller in a PID namespace, those outside of it.
//
// The error wraps gpu.ErrNotSupported if the driver cannot list compute processes.
func (c *Client) Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	var found []nvml.ProcessInfo
	err := c.onGPU(ctx, pciAddress, func(h *handle) (err error) {
		found, err = c.processInfos(ctx, h)
		return err
	})
	if err != nil {
		return nil, err
	}
	var out []gpu.Process
	for _, p := range found {
		out = append(out, processOf(p))
	}
	slices.SortFunc(out, compareProcesses)
	return slices.Compact(out), nil
}

// processInfos joins the lists of processes that the library has.
func (c *Client) processInfos(ctx context.Context, h *handle) ([]nvml.ProcessInfo, error) {
	type list struct {
		call     string
		f        func() ([]nvml.ProcessInfo, nvml.Return)
		optional bool
	}
	lists := []list{
		{"nvmlDeviceGetComputeRunningProcesses_v3", h.dev.GetComputeRunningProcesses, false},
		{"nvmlDeviceGetGraphicsRunningProcesses_v3", h.dev.GetGraphicsRunningProcesses, true},
	}
	if c.features().mpsProcesses {
		lists = append(lists, list{"nvmlDeviceGetMPSComputeRunningProcesses_v3", h.dev.GetMPSComputeRunningProcesses, true})
	}
	var all []nvml.ProcessInfo
	for _, l := range lists {
		found, err := get(ctx, h.queue, l.call, l.f)
		if l.optional {
			found, err = optional(found, err)
		}
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

func processOf(p nvml.ProcessInfo) gpu.Process {
	one := gpu.Process{PID: int(p.Pid), InstanceID: -1}
	if p.GpuInstanceId != noInstance {
		one.InstanceID = int(p.GpuInstanceId)
	}
	return one
}

func compareProcesses(a, b gpu.Process) int {
	return cmp.Or(cmp.Compare(a.InstanceID, b.InstanceID), cmp.Compare(a.PID, b.PID))
}
