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
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) (out []gpu.Process) {
		for _, p := range r.processes() {
			out = append(out, processOf(p))
		}
		slices.SortFunc(out, compareProcesses)
		return slices.Compact(out)
	})
}

// processes joins the lists of processes that the library has.
func (r *reading) processes() []nvml.ProcessInfo {
	compute := must(r, "nvmlDeviceGetComputeRunningProcesses_v3", r.dev.GetComputeRunningProcesses)
	graphics, _ := ask(r, "nvmlDeviceGetGraphicsRunningProcesses_v3", r.dev.GetGraphicsRunningProcesses)
	mps, _ := ask(r, "nvmlDeviceGetMPSComputeRunningProcesses_v3", r.dev.GetMPSComputeRunningProcesses)
	return slices.Concat(compute, graphics, mps)
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
