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
// A GPU without partitions costs 5 to 7 calls of the library, each partition 5 more, and 4 for
// how busy it is. A single value that cannot be read, but for the memory and the processes, is
// left out.
func (c *Client) Usage(ctx context.Context, pciAddress string, partitions []gpu.PartitionID, since time.Time) (gpu.Usage, error) {
	lib, err := c.library()
	if err != nil {
		return gpu.Usage{}, err
	}
	var usage gpu.Usage
	err = c.onGPU(ctx, pciAddress, func(h *handle) (err error) {
		usage = gpu.Usage{}
		if usage.Memory, err = c.memoryUsage(ctx, h, h.dev); err != nil {
			return err
		}
		if usage.Processes, err = c.processUsage(ctx, h); err != nil {
			return err
		}
		if err := unlessLasting(ctx, c.readUtilization(ctx, h, since, &usage)); err != nil {
			return err
		}
		for _, id := range partitions {
			one := gpu.PartitionUsage{PartitionID: id}
			one.Memory, err = c.partitionMemory(ctx, h, id)
			if errors.Is(err, gpu.ErrNotFound) || errors.Is(err, gpu.ErrInvalid) {
				continue // gone, or a handle of one that has just gone
			}
			if err != nil {
				return err
			}
			if one.Utilization, err = c.partitionUtilization(ctx, h, lib, id); unlessLasting(ctx, err) != nil {
				return err
			}
			usage.Partitions = append(usage.Partitions, one)
		}
		return unlessLasting(ctx, h.dropSamples(ctx, usage.Partitions))
	})
	if err != nil {
		return gpu.Usage{}, err
	}
	usage.Time = time.Now()
	return usage, nil
}

// unlessLasting returns an error after which nothing more can be asked: that a call is out, or
// that there is no more time.
func unlessLasting(ctx context.Context, err error) error {
	if gpu.IsPending(err) || ctx.Err() != nil {
		return err
	}
	return nil
}

// partitionMemory fails with gpu.ErrNotFound where another partition is in the place.
func (c *Client) partitionMemory(ctx context.Context, h *handle, id gpu.PartitionID) (gpu.MemoryUsage, error) {
	dev, err := h.deviceOf(ctx, id.InstanceID, id.ComputeID)
	if err != nil {
		return gpu.MemoryUsage{}, err
	}
	const call = "nvmlDeviceGetUUID"
	uuid, err := get(ctx, h.queue, call, dev.GetUUID)
	if err != nil {
		return gpu.MemoryUsage{}, err
	}
	if uuid != id.UUID {
		return gpu.MemoryUsage{}, &gpu.Error{Call: call, PCIAddress: h.pci, Err: gpu.ErrNotFound, Text: uuid + " is there, not " + id.UUID}
	}
	return c.memoryUsage(ctx, h, dev)
}

// memoryUsage reads the memory of the GPU or of a MIG device of it. GPUs that share the
// host's memory have none to report.
func (c *Client) memoryUsage(ctx context.Context, h *handle, dev nvml.Device) (gpu.MemoryUsage, error) {
	if c.features().reservedMemory {
		memory, err := optional(get(ctx, h.queue, "nvmlDeviceGetMemoryInfo_v2", dev.GetMemoryInfo_v2))
		if err != nil || memory.Total > 0 {
			return gpu.MemoryUsage{TotalBytes: memory.Total, UsedBytes: memory.Used, ReservedBytes: memory.Reserved}, err
		}
	}
	// It counts what is reserved as used.
	memory, err := optional(get(ctx, h.queue, "nvmlDeviceGetMemoryInfo", dev.GetMemoryInfo))
	return gpu.MemoryUsage{TotalBytes: memory.Total, UsedBytes: memory.Used}, err
}

// memoryUnknown is NVML_VALUE_NOT_AVAILABLE of a 64-bit value.
const memoryUnknown = math.MaxUint64

// processUsage lists processes with what they use. A driver that cannot list them has none.
func (c *Client) processUsage(ctx context.Context, h *handle) ([]gpu.ProcessUsage, error) {
	found, err := c.processInfos(ctx, h)
	if errors.Is(err, gpu.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	processes := []gpu.ProcessUsage{}
	for _, p := range found {
		one := gpu.ProcessUsage{Process: processOf(p)}
		if p.UsedGpuMemory != memoryUnknown {
			one.MemoryBytes = &p.UsedGpuMemory
		}
		processes = append(processes, one)
	}
	// One that is in several lists has its memory in each.
	slices.SortFunc(processes, func(a, b gpu.ProcessUsage) int {
		return cmp.Or(compareProcesses(a.Process, b.Process), cmp.Compare(memoryOf(b), memoryOf(a)))
	})
	return slices.CompactFunc(processes, func(a, b gpu.ProcessUsage) bool { return a.Process == b.Process }), nil
}

func memoryOf(p gpu.ProcessUsage) uint64 {
	if p.MemoryBytes == nil {
		return 0
	}
	return *p.MemoryBytes
}
