// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Usage reads what is used of a GPU, and of those of its partitions that are asked for. It
// changes nothing and takes no lock: a partition that goes meanwhile is left out. How busy
// processes were is since a time, how busy partitions were since the last call.
//
// A GPU without partitions costs 9 to 11 calls of the library, each partition 5 more, and 4 for
// how busy it is. A single value that cannot be read, but for the memory and the processes, is
// left out.
func (c *Client) Usage(ctx context.Context, pciAddress string, partitions []gpu.PartitionID, since time.Time) (gpu.Usage, error) {
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) (usage gpu.Usage) {
		usage.Memory = r.memory(r.dev)
		usage.Processes = r.processes()
		if errors.Is(r.err, gpu.ErrNotSupported) {
			usage.Processes, r.err = nil, nil // a driver that cannot list them has none
		}
		if r.err != nil {
			return usage
		}
		readUtilization(r, since, &usage)
		r.pardon()
		for _, id := range partitions {
			one := gpu.PartitionUsage{PartitionID: id, Memory: readPartitionMemory(r, id)}
			if errors.Is(r.err, gpu.ErrNotFound) || errors.Is(r.err, gpu.ErrInvalid) {
				r.err = nil
				continue // gone, or a handle of one that has just gone
			}
			if r.err != nil {
				return usage
			}
			one.Utilization = readPartitionUtilization(r, id)
			r.pardon()
			usage.Partitions = append(usage.Partitions, one)
		}
		dropSamples(r, usage.Partitions)
		r.pardon()
		readMeters(r, &usage)
		usage.Time = time.Now()
		return usage
	})
}

// pardon forgets that a value could not be read, unless nothing more can be asked.
func (r *reading) pardon() {
	if !r.over() {
		r.err = nil
	}
}

// partitionMemory fails with gpu.ErrNotFound where another partition is in the place.
func readPartitionMemory(r *reading, id gpu.PartitionID) gpu.MemoryUsage {
	dev := r.deviceOf(id.InstanceID, id.ComputeID)
	r.is(dev, id.UUID)
	return r.memory(dev)
}

// memory reads the memory of the GPU or of a MIG device of it. GPUs that share the
// host's memory have none to report.
func (r *reading) memory(dev nvml.Device) gpu.MemoryUsage {
	all, _ := ask(r, "nvmlDeviceGetMemoryInfo_v2", func() (nvml.Memory_v2, nvml.Return) { return dev.GetMemoryInfo_v2() })
	if all.Total > 0 {
		return gpu.MemoryUsage{TotalBytes: all.Total, UsedBytes: all.Used, ReservedBytes: all.Reserved}
	}
	// It counts what is reserved as used.
	memory, _ := ask(r, "nvmlDeviceGetMemoryInfo", func() (nvml.Memory, nvml.Return) { return dev.GetMemoryInfo() })
	return gpu.MemoryUsage{TotalBytes: memory.Total, UsedBytes: memory.Used}
}

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
