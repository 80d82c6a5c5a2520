// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

const percent = 100

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
	last := swapSample(r, id, nil) // nobody else may free it now
	now := must(r, "nvmlGpmSampleAlloc", r.lib.GpmSampleAlloc)
	r.change("nvmlGpmMigSampleGet", func() nvml.Return { return r.dev.GpmMigSampleGet(id.InstanceID, now) })
	if r.err != nil {
		freeSample(r, now)
		swapSample(r, id, last)
		return nil
	}
	defer func() { freeSample(r, swapSample(r, id, now)) }()
	if last == nil {
		return nil
	}
	metric := must(r, "nvmlGpmMetricsGet", func() (float64, nvml.Return) {
		metrics := nvml.GpmMetricsGetType{NumMetrics: 1, Sample1: last, Sample2: now}
		metrics.Metrics[0].MetricId = uint32(nvml.GPM_METRIC_SM_UTIL)
		ret := r.lib.GpmMetricsGet(&metrics)
		if ret == nvml.SUCCESS {
			ret = nvml.Return(metrics.Metrics[0].NvmlReturn)
		}
		return metrics.Metrics[0].Value, ret
	})
	freeSample(r, last)
	if r.err != nil {
		return nil
	}
	return new(ratio(metric))
}

// swapSample keeps a sample, or none, and returns the one before it.
func swapSample(r *reading, id gpu.PartitionID, s nvml.GpmSample) (before nvml.GpmSample) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before = r.samples[id]
	r.samples[id] = s
	return before
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
	var dropped []nvml.GpmSample
	r.mu.Lock()
	for id, s := range r.samples {
		if !slices.ContainsFunc(keep, func(p gpu.PartitionUsage) bool { return p.PartitionID == id }) {
			dropped = append(dropped, s)
			delete(r.samples, id)
		}
	}
	r.mu.Unlock()
	for _, s := range dropped {
		freeSample(r, s)
	}
}
