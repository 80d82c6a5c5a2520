// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

const (
	percent  = 100
	thousand = 1000
	kibi     = 1024
	// allLinks is the scope of a field that adds up the links.
	allLinks = math.MaxUint32
)

// Usage reads what is used of a GPU, and of those of its partitions that are asked for. It
// changes nothing and takes no lock: a partition that goes meanwhile is left out. How busy
// processes were is since a time, how busy partitions were since the last call. There must be
// one caller at a time for each GPU.
//
// A GPU without partitions costs 9 to 11 calls of the library, each partition 5 more, and 4 for
// how busy it is. A single value that cannot be read, but for the memory and the processes, is
// left out.
func (c *Client) Usage(ctx context.Context, pciAddress string, partitions []gpu.PartitionID, since time.Time) (gpu.Usage, error) {
	return onGPU(ctx, &c.session, pciAddress, func(r *reading) (usage gpu.Usage) {
		usage.UsedBytes = r.usedBytes(r.dev)
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
			dev := r.deviceOf(id.InstanceID, id.ComputeID)
			r.is(dev, id.UUID) // another one may be in the place
			one := gpu.PartitionUsage{PartitionID: id, UsedBytes: r.usedBytes(dev)}
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

// usedBytes reads what programs have of the memory of the GPU or of a MIG device of it. GPUs that share the
// host's memory have none to report.
func (r *reading) usedBytes(dev nvml.Device) uint64 {
	memory, _ := ask(r, "nvmlDeviceGetMemoryInfo_v2", func() (nvml.Memory_v2, nvml.Return) { return dev.GetMemoryInfo_v2() })
	return memory.Used
}

// readUtilization reads how busy the undivided GPU is, and each process on it since a time.
// With MIG mode on neither is supported.
func readUtilization(r *reading, since time.Time, usage *gpu.Usage) {
	if rates, known := ask(r, "nvmlDeviceGetUtilizationRates", r.dev.GetUtilizationRates); known {
		usage.Utilization = new(ratio(float64(rates.Gpu)))
	}
	var last uint64
	if !since.IsZero() {
		last = uint64(since.UnixMicro())
	}
	samples, known := ask(r, "nvmlDeviceGetProcessUtilization", func() ([]nvml.ProcessUtilizationSample, nvml.Return) {
		found, ret := r.dev.GetProcessUtilization(last)
		if ret == nvml.ERROR_NOT_FOUND {
			return nil, nvml.SUCCESS // no process did anything
		}
		return found, ret
	})
	if !known {
		return
	}
	usage.ProcessUtilization = true
	busy := map[int]float64{}
	for _, s := range samples {
		busy[int(s.Pid)] = ratio(float64(s.SmUtil))
	}
	for i := range usage.Processes {
		if p := &usage.Processes[i]; p.InstanceID < 0 {
			p.Utilization = new(busy[p.PID])
		}
	}
}

func ratio(percentage float64) float64 { return max(0, min(1, percentage/percent)) }

// readPartitionUtilization returns how busy a partition was since the last sample of it, and nil
// the first time and where the GPU cannot tell: GPM (GPU Performance Monitoring) is the only
// part of NVML that can, from Hopper on. The library makes metrics from two samples, between which nvml.h wants
// 100 ms. It is assumed that others may sample beside.
func readPartitionUtilization(r *reading, id gpu.PartitionID) *float64 {
	if answer, _ := ask(r, "nvmlGpmQueryDeviceSupport", r.dev.GpmQueryDeviceSupport); answer.IsSupportedDevice == 0 {
		return nil
	}
	last := r.samples[id]
	now := must(r, "nvmlGpmSampleAlloc", r.lib.GpmSampleAlloc)
	r.change("nvmlGpmMigSampleGet", func() nvml.Return { return r.dev.GpmMigSampleGet(id.InstanceID, now) })
	if r.err != nil {
		freeSample(r, now)
		return nil
	}
	r.samples[id] = now
	if last == nil {
		return nil
	}
	busy := known(r, "nvmlGpmMetricsGet", func() (float64, nvml.Return) {
		metrics := nvml.GpmMetricsGetType{NumMetrics: 1, Sample1: last, Sample2: now}
		metrics.Metrics[0].MetricId = uint32(nvml.GPM_METRIC_SM_UTIL)
		ret := r.lib.GpmMetricsGet(&metrics)
		if ret == nvml.SUCCESS {
			ret = nvml.Return(metrics.Metrics[0].NvmlReturn)
		}
		return ratio(metrics.Metrics[0].Value), ret
	})
	freeSample(r, last)
	return busy
}

// freeSample frees a sample, if there is one, unless a call may still work on it.
func freeSample(r *reading, s nvml.GpmSample) {
	if s == nil || gpu.IsPending(r.err) {
		return
	}
	if err := do(r.ctx, r.queue, "nvmlGpmSampleFree", s.Free); r.err == nil {
		r.err = err
	}
}

// dropSamples frees the samples of other partitions than these.
func dropSamples(r *reading, keep []gpu.PartitionUsage) {
	if r.err != nil {
		return
	}
	for id, s := range r.samples {
		if !slices.ContainsFunc(keep, func(p gpu.PartitionUsage) bool { return p.PartitionID == id }) {
			delete(r.samples, id)
			freeSample(r, s)
		}
	}
}

// readMeters reads what the board draws and what it moves. A value that cannot be read is left out.
func readMeters(r *reading, usage *gpu.Usage) {
	usage.PowerWatts = known(r, "nvmlDeviceGetPowerUsage", func() (float64, nvml.Return) {
		milliwatts, ret := r.dev.GetPowerUsage()
		return float64(milliwatts) / thousand, ret
	})
	r.pardon()
	if fields, known := readFields(
		r, nvml.FieldValue{FieldId: nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ScopeId: allLinks},
		nvml.FieldValue{FieldId: nvml.FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ScopeId: allLinks},
	); known {
		kib := func(i int) uint64 { return binary.LittleEndian.Uint64(fields[i].Value[:]) }
		usage.NVLink = &gpu.Traffic{Sent: kibi * kib(0), Received: kibi * kib(1)}
	}
	r.pardon()
	// Each of the two counts for 20 ms. The work of a claim does not wait for that, but the next sample
	// does without.
	if r.queue.Idle() {
		usage.PCIe = readPCIe(r)
		r.pardon()
	}
}

// readPCIe returns both directions or nothing.
func readPCIe(r *reading) *gpu.Traffic {
	read := func(counter nvml.PcieUtilCounter) uint64 {
		return thousand * uint64(must(r, "nvmlDeviceGetPcieThroughput", func() (uint32, nvml.Return) { return r.dev.GetPcieThroughput(counter) }))
	}
	traffic := gpu.Traffic{Sent: read(nvml.PCIE_UTIL_TX_BYTES), Received: read(nvml.PCIE_UTIL_RX_BYTES)}
	if r.err != nil {
		return nil
	}
	return &traffic
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
