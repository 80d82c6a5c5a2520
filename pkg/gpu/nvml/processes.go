// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"math"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
)

// noInstance is NVML's id for "the undivided GPU".
const noInstance = 0xFFFFFFFF

// memoryUnknown is NVML_VALUE_NOT_AVAILABLE of a 64-bit value.
const memoryUnknown = math.MaxUint64

// Processes returns the processes that use the GPU or an instance of it, for compute
// (MPS included) or graphics, each once per instance. NVML does not list processes
// that only have a management handle open, such as monitoring agents, nor, to a
// caller in a PID namespace, those outside of it.
//
// The error wraps gpu.ErrNotSupported if the driver cannot list compute processes.
func (c *Client) Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) (out []gpu.Process) {
		for _, p := range r.processes() {
			out = append(out, p.Process)
		}
		return out
	})
}

// processes joins the lists of processes that the library has.
func (r *reading) processes() []gpu.ProcessUsage {
	compute := must(r, "nvmlDeviceGetComputeRunningProcesses_v3", r.dev.GetComputeRunningProcesses)
	graphics, _ := ask(r, "nvmlDeviceGetGraphicsRunningProcesses_v3", r.dev.GetGraphicsRunningProcesses)
	mps, _ := ask(r, "nvmlDeviceGetMPSComputeRunningProcesses_v3", r.dev.GetMPSComputeRunningProcesses)
	all := []gpu.ProcessUsage{}
	for _, p := range slices.Concat(compute, graphics, mps) {
		one := gpu.ProcessUsage{Process: gpu.Process{PID: int(p.Pid), InstanceID: -1}}
		if p.GpuInstanceId != noInstance {
			one.InstanceID = int(p.GpuInstanceId)
		}
		if p.UsedGpuMemory != memoryUnknown {
			one.MemoryBytes = &p.UsedGpuMemory
		}
		all = append(all, one)
	}
	// One that is in several lists has its memory in each.
	memory := func(p gpu.ProcessUsage) uint64 { return *cmp.Or(p.MemoryBytes, new(uint64)) }
	slices.SortFunc(all, func(a, b gpu.ProcessUsage) int {
		return cmp.Or(cmp.Compare(a.InstanceID, b.InstanceID), cmp.Compare(a.PID, b.PID), cmp.Compare(memory(b), memory(a)))
	})
	return slices.CompactFunc(all, func(a, b gpu.ProcessUsage) bool { return a.Process == b.Process })
}
