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

// utilization reads how busy the undivided GPU is, and each process on it since a time.
// With MIG mode on neither is supported.
func (r *reading) utilization(since time.Time, usage *gpu.Usage) {
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

// gpmInterval is the time that nvml.h wants between two samples.
const gpmInterval = 100 * time.Millisecond

// gpmSample is the last sample of a partition. The library makes metrics from two.
type gpmSample struct {
	sample      nvml.GpmSample
	taken       time.Time
	utilization *float64 // since the sample before, nil if there was none
}

// partitionUtilization returns how busy a partition was since the last sample of it, and nil
// the first time and where the GPU cannot tell: GPM (GPU Performance Monitoring) is the only
// part of NVML that can, from Hopper on. It is assumed that others may sample beside. Within
// gpmInterval after a sample its answer is repeated: a reader in a hurry would otherwise
// replace each sample before it is old enough.
func (r *reading) partitionUtilization(id gpu.PartitionID) *float64 {
	if !r.gpmSupported() {
		return nil
	}
	last, recent := r.takeSample(id)
	if recent {
		return last.utilization
	}
	now := gpmSample{sample: must(r, "nvmlGpmSampleAlloc", r.lib.GpmSampleAlloc)}
	r.change("nvmlGpmMigSampleGet", func() nvml.Return { return r.dev.GpmMigSampleGet(id.InstanceID, now.sample) })
	now.taken = time.Now()
	if r.err != nil {
		r.freeSample(now)
		r.keepSample(id, last)
		return nil
	}
	if last.sample != nil {
		metric := must(r, "nvmlGpmMetricsGet", func() (float64, nvml.Return) {
			metrics := nvml.GpmMetricsGetType{NumMetrics: 1, Sample1: last.sample, Sample2: now.sample}
			metrics.Metrics[0].MetricId = uint32(nvml.GPM_METRIC_SM_UTIL)
			ret := r.lib.GpmMetricsGet(&metrics)
			if ret == nvml.SUCCESS {
				ret = nvml.Return(metrics.Metrics[0].NvmlReturn)
			}
			return metrics.Metrics[0].Value, ret
		})
		if r.err == nil {
			now.utilization = new(ratio(metric))
		}
	}
	r.keepSample(id, now)
	r.freeSample(last)
	return now.utilization
}

// takeSample returns the last sample of a partition, for one caller unless it is a recent one.
func (r *reading) takeSample(id gpu.PartitionID) (last gpmSample, recent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	last = r.samples[id]
	if recent = time.Since(last.taken) < gpmInterval; !recent {
		delete(r.samples, id)
	}
	return last, recent
}

func (r *reading) keepSample(id gpu.PartitionID, s gpmSample) {
	r.mu.Lock()
	other := r.samples[id]
	r.samples[id] = s
	r.mu.Unlock()
	r.freeSample(other)
}

// freeSample frees a sample, if there is one, unless a call may still work on it.
func (r *reading) freeSample(s gpmSample) {
	if s.sample == nil || gpu.IsPending(r.err) {
		return
	}
	if err := do(r.ctx, r.queue, "nvmlGpmSampleFree", s.sample.Free); r.err == nil {
		r.err = err
	}
}

// gpmSupported asks once.
func (r *reading) gpmSupported() bool {
	supported := lasting(&r.gpm, func() *bool {
		answer, _ := ask(r, "nvmlGpmQueryDeviceSupport", r.dev.GpmQueryDeviceSupport)
		if r.err != nil {
			return nil
		}
		return new(answer.IsSupportedDevice != 0)
	})
	return supported != nil && *supported
}

// dropSamples frees the samples of other partitions than these.
func (r *reading) dropSamples(keep []gpu.PartitionUsage) {
	if r.err != nil {
		return
	}
	var dropped []gpmSample
	r.mu.Lock()
	for id, s := range r.samples {
		if !slices.ContainsFunc(keep, func(p gpu.PartitionUsage) bool { return p.PartitionID == id }) {
			dropped = append(dropped, s)
			delete(r.samples, id)
		}
	}
	r.mu.Unlock()
	for _, s := range dropped {
		r.freeSample(s)
	}
}
