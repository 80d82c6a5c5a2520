// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

const percent = 100

// readUtilization reads how busy the undivided GPU is, and each process on it since a time.
// With MIG mode on neither is supported.
func (c *Client) readUtilization(ctx context.Context, h *handle, since time.Time, usage *gpu.Usage) error {
	if call := "nvmlDeviceGetUtilizationRates"; c.features().utilization {
		rates, err := known(get(ctx, h.queue, call, h.dev.GetUtilizationRates))
		if err != nil {
			return err
		}
		if rates != nil {
			usage.Utilization = new(ratio(float64(rates.Gpu)))
		}
	}
	if !c.features().processUtilization {
		return nil
	}
	var last uint64
	if !since.IsZero() {
		last = uint64(since.UnixMicro())
	}
	samples, err := get(ctx, h.queue, "nvmlDeviceGetProcessUtilization", func() ([]nvml.ProcessUtilizationSample, nvml.Return) {
		return h.dev.GetProcessUtilization(last)
	})
	switch {
	case errors.Is(err, gpu.ErrNotFound): // no process did anything
	case errors.Is(err, gpu.ErrNotSupported):
		return nil
	case err != nil:
		return err
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
	return nil
}

func ratio(percentage float64) float64 { return max(0, min(1, percentage/percent)) }

// gpmInterval is the time that nvml.h wants between two samples.
const gpmInterval = 100 * time.Millisecond

// gpmSample is the last sample of a partition. The library makes metrics from two.
type gpmSample struct {
	of          gpu.PartitionID
	sample      nvml.GpmSample
	taken       time.Time
	utilization *float64 // since the sample before, nil if there was none
}

// partitionUtilization returns how busy a partition was since the last sample of it, and nil
// the first time and where the GPU cannot tell: GPM (GPU Performance Monitoring) is the only
// part of NVML that can, from Hopper on. It is assumed that others may sample beside. Within
// gpmInterval after a sample its answer is repeated: a reader in a hurry would otherwise
// replace each sample before it is old enough.
func (c *Client) partitionUtilization(ctx context.Context, h *handle, lib nvml.Interface, id gpu.PartitionID) (*float64, error) {
	supported, err := c.gpmSupported(ctx, h)
	if err != nil || !supported {
		return nil, err
	}
	if last := h.lastSample(id); time.Since(last.taken) < gpmInterval {
		return last.utilization, nil
	}
	now, err := get(ctx, h.queue, "nvmlGpmSampleAlloc", lib.GpmSampleAlloc)
	if err != nil {
		return nil, err
	}
	err = do(ctx, h.queue, "nvmlGpmMigSampleGet", func() nvml.Return { return h.dev.GpmMigSampleGet(id.InstanceID, now) })
	if gpu.IsPending(err) {
		return nil, err // the call may still write to the sample
	}
	if err != nil {
		return nil, errors.Join(err, do(ctx, h.queue, "nvmlGpmSampleFree", now.Free))
	}
	before := h.swapSample(gpmSample{of: id, sample: now, taken: time.Now()})
	if before == nil {
		return nil, nil //nolint:nilnil // not known yet
	}
	metric, err := get(ctx, h.queue, "nvmlGpmMetricsGet", func() (float64, nvml.Return) {
		metrics := nvml.GpmMetricsGetType{NumMetrics: 1, Sample1: before, Sample2: now}
		metrics.Metrics[0].MetricId = uint32(nvml.GPM_METRIC_SM_UTIL)
		ret := lib.GpmMetricsGet(&metrics)
		if ret == nvml.SUCCESS {
			ret = nvml.Return(metrics.Metrics[0].NvmlReturn)
		}
		return metrics.Metrics[0].Value, ret
	})
	if gpu.IsPending(err) {
		return nil, err
	}
	if freeErr := do(ctx, h.queue, "nvmlGpmSampleFree", before.Free); err == nil {
		err = freeErr
	}
	if err != nil {
		return nil, err
	}
	utilization := new(ratio(metric))
	h.keepUtilization(gpmSample{of: id, sample: now, utilization: utilization})
	return utilization, nil
}

// gpmSupported asks once.
func (c *Client) gpmSupported(ctx context.Context, h *handle) (bool, error) {
	if !c.features().gpm {
		return false, nil
	}
	h.mu.Lock()
	known := h.gpm
	h.mu.Unlock()
	if known != nil {
		return *known, nil
	}
	answer, err := optional(get(ctx, h.queue, "nvmlGpmQueryDeviceSupport", h.dev.GpmQueryDeviceSupport))
	if err != nil {
		return false, err
	}
	supported := answer.IsSupportedDevice != 0
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gpm = &supported
	return supported, nil
}

// lastSample returns the last sample of a partition. One that was never taken is old.
func (h *handle) lastSample(of gpu.PartitionID) gpmSample {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.samples {
		if s.of == of {
			return s
		}
	}
	return gpmSample{}
}

// swapSample keeps a sample, and returns the one before it of the same partition, or nil.
func (h *handle) swapSample(now gpmSample) (before nvml.GpmSample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.samples {
		if h.samples[i].of == now.of {
			before, h.samples[i] = h.samples[i].sample, now
			return before
		}
	}
	h.samples = append(h.samples, now)
	return nil
}

// keepUtilization keeps what was made of a sample, unless another one was taken meanwhile.
func (h *handle) keepUtilization(made gpmSample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.samples {
		if h.samples[i].of == made.of && h.samples[i].sample == made.sample {
			h.samples[i].utilization = made.utilization
		}
	}
}

// dropSamples frees the samples of other partitions than these.
func (h *handle) dropSamples(ctx context.Context, keep []gpu.PartitionUsage) error {
	h.mu.Lock()
	var kept, dropped []gpmSample
	for _, s := range h.samples {
		if hasPartition(keep, s.of) {
			kept = append(kept, s)
		} else {
			dropped = append(dropped, s)
		}
	}
	h.samples = kept
	h.mu.Unlock()
	var errs []error
	for _, s := range dropped {
		errs = append(errs, do(ctx, h.queue, "nvmlGpmSampleFree", s.sample.Free))
	}
	return errors.Join(errs...)
}

func hasPartition(all []gpu.PartitionUsage, id gpu.PartitionID) bool {
	for i := range all {
		if all[i].PartitionID == id {
			return true
		}
	}
	return false
}
