// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"slices"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Processes that are busy have samples, and the GPU is as busy as all of them.
func TestUtilization(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	lib := r.open()
	d := device(t, lib, 0)
	_, ret := d.GetProcessUtilization(0)
	wants(t, "GetProcessUtilization of nobody", ret, nvml.ERROR_NOT_FOUND)
	reasons, ret := d.GetCurrentClocksEventReasons()
	if wants(t, "GetCurrentClocksEventReasons", ret, nvml.SUCCESS); reasons != nvml.ClocksEventReasonGpuIdle {
		t.Errorf("reasons %#x of an idle GPU", reasons)
	}
	r.update(func(m *machine.Machine) {
		for i, sm := range []int{30, 0, 50} {
			m.Processes = append(m.Processes, machine.Process{PID: 100 + i, InstanceID: -1, ComputeID: -1, MemoryBytes: miB, SM: sm})
		}
		m.Processes[2].Kind = machine.MPSClient
	})
	before := uint64(time.Now().Add(-time.Hour).UnixMicro())
	samples, ret := d.GetProcessUtilization(before)
	wants(t, "GetProcessUtilization", ret, nvml.SUCCESS)
	got := map[uint32]uint32{}
	for _, s := range samples {
		got[s.Pid] = s.SmUtil
		if s.TimeStamp <= before {
			t.Errorf("sample of %d, before %d", s.TimeStamp, before)
		}
	}
	if len(got) != 2 || got[100] != 30 || got[102] != 50 {
		t.Errorf("samples %v", got)
	}
	_, ret = d.GetProcessUtilization(uint64(time.Now().Add(time.Hour).UnixMicro()))
	wants(t, "GetProcessUtilization of the future", ret, nvml.ERROR_NOT_FOUND)
	rates, ret := d.GetUtilizationRates()
	if wants(t, "GetUtilizationRates", ret, nvml.SUCCESS); rates.Gpu != 80 {
		t.Errorf("rates %+v", rates)
	}
	r.update(func(m *machine.Machine) { m.Processes = nil })
	enable(t, d)
	_, ret = d.GetUtilizationRates()
	wants(t, "GetUtilizationRates with MIG", ret, nvml.ERROR_NOT_SUPPORTED)
	_, ret = d.GetProcessUtilization(0)
	wants(t, "GetProcessUtilization with MIG", ret, nvml.ERROR_NOT_SUPPORTED)
}

// A process that may not write the state, as in a container, says how busy it is as well.
func TestUtilizationOfHolder(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	d := device(t, r.open(), 0)
	h, err := r.file().Hold(machine.Process{InstanceID: -1, ComputeID: -1, MemoryBytes: miB, SM: 40})
	if err != nil {
		t.Fatal(err)
	}
	expect := func(sm uint32) {
		t.Helper()
		rates, ret := d.GetUtilizationRates()
		if wants(t, "GetUtilizationRates", ret, nvml.SUCCESS); rates.Gpu != sm {
			t.Errorf("rates %+v, want %d %%", rates, sm)
		}
	}
	expect(40)
	if err := h.Change(machine.Process{InstanceID: -1, ComputeID: -1, MemoryBytes: 3 * miB, SM: 100}); err != nil {
		t.Fatal(err)
	}
	expect(100)
	processes, ret := d.GetComputeRunningProcesses()
	if wants(t, "GetComputeRunningProcesses", ret, nvml.SUCCESS); len(processes) != 1 || processes[0].UsedGpuMemory != 3*miB {
		t.Errorf("processes %+v", processes)
	}
}

// GPM tells how busy partitions are, from Hopper on.
func TestGPM(t *testing.T) {
	ampere := h100(1)
	ampere.Architecture = nvml.DEVICE_ARCH_AMPERE
	r := newRoot(t, machineOf(h100(0), ampere))
	lib := r.open()
	d, old := device(t, lib, 0), device(t, lib, 1)
	enable(t, d)
	createCompute(t, createAt(t, d, id3g, place(0, 4)), nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE)
	for device, want := range map[nvml.Device]uint32{d: 1, old: 0} {
		support, ret := device.GpmQueryDeviceSupport()
		if wants(t, "GpmQueryDeviceSupport", ret, nvml.SUCCESS); support.IsSupportedDevice != want {
			t.Errorf("GPM support %d, want %d", support.IsSupportedDevice, want)
		}
	}
	var samples [2]nvml.GpmSample
	for i := range samples {
		var ret nvml.Return
		samples[i], ret = lib.GpmSampleAlloc()
		wants(t, "GpmSampleAlloc", ret, nvml.SUCCESS)
	}
	wants(t, "sample of an old GPU", old.GpmSampleGet(samples[0]), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "sample of no instance", d.GpmMigSampleGet(14, samples[0]), nvml.ERROR_NOT_FOUND)
	id := r.machine().GPUs[0].MIG.Instances[0].ID
	r.update(func(m *machine.Machine) {
		m.Processes = []machine.Process{{PID: 100, InstanceID: id, SM: 60}}
	})
	metrics := func() nvml.GpmMetric {
		t.Helper()
		request := nvml.GpmMetricsGetType{NumMetrics: 2, Sample1: samples[0], Sample2: samples[1]}
		request.Metrics[0].MetricId, request.Metrics[1].MetricId = uint32(nvml.GPM_METRIC_SM_UTIL), uint32(nvml.GPM_METRIC_DRAM_BW_UTIL)
		wants(t, "GpmMetricsGet", lib.GpmMetricsGet(&request), nvml.SUCCESS)
		wants(t, "a metric that is not modelled", nvml.Return(request.Metrics[1].NvmlReturn), nvml.ERROR_NOT_SUPPORTED)
		return request.Metrics[0]
	}
	wants(t, "GpmMigSampleGet", d.GpmMigSampleGet(id, samples[0]), nvml.SUCCESS)
	wants(t, "GpmMigSampleGet", d.GpmMigSampleGet(id, samples[1]), nvml.SUCCESS)
	time.Sleep(100 * time.Millisecond) // what nvml.h wants between two samples
	wants(t, "GpmMigSampleGet", d.GpmMigSampleGet(id, samples[1]), nvml.SUCCESS)
	if m := metrics(); m.Value != 60 || m.NvmlReturn != 0 {
		t.Errorf("metric %+v", m)
	}
	for _, s := range slices.Backward(samples[:]) {
		wants(t, "GpmSampleFree", s.Free(), nvml.SUCCESS)
	}
	wants(t, "GpmSampleFree twice", samples[0].Free(), nvml.ERROR_INVALID_ARGUMENT)
}
